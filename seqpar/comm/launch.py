"""Join the processes that a launcher started: find this process's rank, the store and the group."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed import Store as Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from seqpar.comm.faults.heartbeat import close_connections
from seqpar.comm.messages.comm import Comm
from seqpar.core.torch_private import forget_failed_group

FOREVER = timedelta(days=7)
_START = timedelta(minutes=10)  # limit on the time until all processes of a launcher have begun


@dataclass(frozen=True)
class LaunchedProcess:
    rank: int
    size: int  # the number of processes
    local: int  # the index of this process among those on its host
    host: str  # the host of the store
    port: int
    serves: bool  # whether this process keeps the store; if none does, the launcher does


def place() -> LaunchedProcess | None:
    environ = os.environ
    if "RANK" in environ and "WORLD_SIZE" in environ:
        rank, size, local = _int("RANK"), _int("WORLD_SIZE"), _int("LOCAL_RANK", 0)
        by_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address = environ.get("MASTER_ADDR", "127.0.0.1"), _int("MASTER_PORT", 29500)
        return LaunchedProcess(rank, size, local, *address, rank == 0 and not by_agent)
    if _int("SLURM_STEP_NUM_TASKS", 1) < 2 or "SLURM_PROCID" not in environ:
        return None  # a batch script is one process, although Slurm's variables describe more tasks
    rank, size, local = _int("SLURM_PROCID"), _int("SLURM_STEP_NUM_TASKS"), _int("SLURM_LOCALID", 0)
    host = environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", "127.0.0.1"))
    port = _int("MASTER_PORT", 20000 + _int("SLURM_JOB_ID", 0) % 20000)
    return LaunchedProcess(rank, size, local, host, port, rank == 0)


def on_a_host() -> int:
    """Return how many processes the launcher starts on each host, or 0 if the launcher does not
    say.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    number = re.match(r"\d+", text)  # Slurm writes 8(x2) for 8 tasks on each of two hosts
    return int(number[0]) if number else 0


def _int(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be an integer, got {text!r}") from None


def first_host(nodes: str) -> str:
    """Return the first host of a list of hosts in Slurm's notation, such as gpu[01-04,07]-a."""
    found = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\])?([^,]*)", nodes)
    assert found is not None  # always matches, because all three parts may be empty
    return "".join(part or "" for part in found.groups())


def store_of(where: LaunchedProcess | None) -> tuple[Store, tuple[str, int]]:
    """Return a store for the processes that a launcher started, and its address.

    Without a launcher, the store is a new store of this process.
    """
    if where is None:
        alone = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return alone, ("127.0.0.1", alone.port)
    store = TCPStore(
        where.host, where.port, is_master=where.serves, wait_for_workers=False, timeout=_START
    )
    return store, (where.host, where.port)


def connect(host: str, port: int, timeout: timedelta = timedelta(minutes=5)) -> Store:
    """Connect to the store at this address, for at most `timeout`.

    A later read of a key waits until the key exists.
    """
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    store.set_timeout(FOREVER)
    return store


def join(
    store: Store,
    name: str,
    rank: int,
    size: int,
    device: torch.device,
    timeout: timedelta = FOREVER,  # callers have their own time limits
) -> Comm:
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    prefixed = PrefixStore(f"{name}/", store)
    try:
        dist.init_process_group(
            backend, store=prefixed, rank=rank, world_size=size, timeout=timeout
        )
    except RuntimeError:
        forget_failed_group()
        raise
    assert dist.group.WORLD is not None
    return Comm.of(dist.group.WORLD)


def leave(failed: bool = False) -> None:
    """Destroy the default group, if there is one. If this process has failed, make the waits of
    other ranks raise an error before the group is destroyed.
    """
    if dist.is_initialized():
        if failed:
            close_connections(dist.group.WORLD)
        dist.destroy_process_group()


@functools.cache
def mesh_of_all(device: torch.device, shape: tuple[int, ...]) -> DeviceMesh:
    """Return a mesh of all processes. The groups of the mesh live as long as the process."""
    return init_device_mesh(device.type, shape)

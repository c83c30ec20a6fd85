"""Join the group that a launcher started: find this process's rank, the store and the group."""

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
    """This process among the processes of a launcher, and the store that they share."""

    rank: int
    size: int  # the number of processes
    local: int  # the number of this process among those on its host
    host: str  # the host of the store
    port: int
    serves: bool  # whether this process keeps the store; if no process does, the launcher does


def place() -> LaunchedProcess | None:
    """Return this process as torchrun or Slurm's srun describes it; None without either."""
    environ = os.environ
    if "RANK" in environ and "WORLD_SIZE" in environ:
        rank, size, local = _int("RANK"), _int("WORLD_SIZE"), _int("LOCAL_RANK", 0)
        by_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address = environ.get("MASTER_ADDR", "127.0.0.1"), _int("MASTER_PORT", 29500)
        return LaunchedProcess(rank, size, local, *address, rank == 0 and not by_agent)
    if _int("SLURM_STEP_NUM_TASKS", 1) < 2 or "SLURM_PROCID" not in environ:
        return None  # a batch script is one process, although Slurm's variables name more tasks
    rank, size, local = _int("SLURM_PROCID"), _int("SLURM_STEP_NUM_TASKS"), _int("SLURM_LOCALID", 0)
    host = environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", "127.0.0.1"))
    port = _int("MASTER_PORT", 20000 + _int("SLURM_JOB_ID", 0) % 20000)
    return LaunchedProcess(rank, size, local, host, port, rank == 0)


def on_a_host() -> int:
    """Return how many processes a launcher started on a host; 0 if it sets no number."""
    text = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    number = re.match(r"\d+", text)  # Slurm writes 8(x2) for 8 on each of two hosts
    return int(number[0]) if number else 0


def _int(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be an integer, got {text!r}") from None


def first_host(nodes: str) -> str:
    """Return the first host of a list that Slurm writes, such as gpu[01-04,07]-a."""
    found = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\])?([^,]*)", nodes)
    assert found is not None  # all three parts may be empty
    return "".join(part or "" for part in found.groups())


def store_of(where: LaunchedProcess | None) -> tuple[Store, tuple[str, int]]:
    """Return a store and its address: the one that a launcher's processes share, or a new one."""
    if where is None:
        alone = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return alone, ("127.0.0.1", alone.port)
    store = TCPStore(
        where.host, where.port, is_master=where.serves, wait_for_workers=False, timeout=_START
    )
    return store, (where.host, where.port)


def connect(host: str, port: int, timeout: timedelta = timedelta(minutes=5)) -> Store:
    """Return the store at this address; reading a key of the store waits until the key exists.

    `timeout` limits the time of connecting.
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
    timeout: timedelta = FOREVER,  # measurements have their own limits
) -> Comm:
    """Return the group of all processes that join under this name, on a CPU or on GPUs."""
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
    """Destroy the default group, if there is one.

    After a failure, end other ranks' waits for this one.
    """
    if dist.is_initialized():
        if failed:
            close_connections(dist.group.WORLD)
        dist.destroy_process_group()


@functools.cache
def mesh_of_all(device: torch.device, shape: tuple[int, ...]) -> DeviceMesh:
    """Return all processes as a mesh, along its rows; its groups live as long as the process."""
    return init_device_mesh(device.type, shape)

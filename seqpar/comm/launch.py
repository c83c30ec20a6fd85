"""Become a rank: what a launcher says of this process, a store to meet at, and the group of all."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from seqpar.comm.messages.exchange import Comm

__all__ = [
    "LaunchedProcess",
    "Store",
    "connect",
    "join",
    "mesh_of_all",
    "on_a_host",
    "place",
    "store_of",
]

_FOREVER = timedelta(days=7)
_START = timedelta(minutes=10)  # that processes of a launcher may take to begin


@dataclass(frozen=True)
class LaunchedProcess:
    """This process among those that a launcher started, and where all of them meet.

    Attributes:
        rank, size: which process it is, of how many.
        local: which it is of those on its host.
        host, port: where the store is.
        serves: whether this process has the store; if none has, the launcher does.
    """

    rank: int
    size: int
    local: int
    host: str
    port: int
    serves: bool


def place() -> LaunchedProcess | None:
    """Return what torchrun or Slurm's srun says of this process; None if neither started it."""
    said = os.environ
    if "RANK" in said and "WORLD_SIZE" in said:
        rank, size, local = _int("RANK"), _int("WORLD_SIZE"), _int("LOCAL_RANK", 0)
        by_agent = said.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address = said.get("MASTER_ADDR", "127.0.0.1"), _int("MASTER_PORT", 29500)
        return LaunchedProcess(rank, size, local, *address, rank == 0 and not by_agent)
    if _int("SLURM_STEP_NUM_TASKS", 1) < 2 or "SLURM_PROCID" not in said:
        return None  # a batch script is one process, however many tasks its job has
    rank, size, local = _int("SLURM_PROCID"), _int("SLURM_STEP_NUM_TASKS"), _int("SLURM_LOCALID", 0)
    host = said.get("MASTER_ADDR") or first_host(said.get("SLURM_STEP_NODELIST", "127.0.0.1"))
    port = _int("MASTER_PORT", 20000 + _int("SLURM_JOB_ID", 0) % 20000)
    return LaunchedProcess(rank, size, local, host, port, rank == 0)


def on_a_host() -> int:
    """Return how many processes a launcher has started on a host; 0 if none says."""
    said = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    found = re.match(r"\d+", said)  # Slurm writes 8(x2) for 8 on each of two hosts
    return int(found[0]) if found else 0


def _int(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be an integer, got {text!r}") from None


def first_host(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it, such as gpu[01-04,07]-a."""
    found = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\])?([^,]*)", nodes)
    assert found is not None  # all three parts may be empty
    return "".join(part or "" for part in found.groups())


def store_of(where: LaunchedProcess | None) -> tuple[Store, tuple[str, int]]:
    """Return a store that all processes of a launcher share, or a new one; and its address.

    Other processes find it by that, with `connect`.
    """
    if where is None:
        alone = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return alone, ("127.0.0.1", alone.port)
    store = TCPStore(
        where.host, where.port, is_master=where.serves, wait_for_workers=False, timeout=_START
    )
    return store, (where.host, where.port)


def connect(host: str, port: int) -> Store:
    """Return the store at this address; reading waits until what is asked for is there."""
    store = TCPStore(host, port, is_master=False, wait_for_workers=False)
    store.set_timeout(_FOREVER)
    return store


def join(store: Store, name: str, rank: int, size: int, device: torch.device) -> Comm:
    """Return the group of all processes that join under this name, on a CPU or on GPUs."""
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        store=PrefixStore(f"{name}/", store),
        rank=rank,
        world_size=size,
        timeout=_FOREVER,  # who measures says how long it may take
    )
    assert dist.group.WORLD is not None
    return Comm.of(dist.group.WORLD)


def mesh_of_all(device: torch.device, shape: tuple[int, ...]) -> DeviceMesh:
    """Return all processes as a mesh of this shape, along its rows."""
    return init_device_mesh(device.type, shape)


def host_name() -> str:
    """Return the name of this host."""
    return socket.gethostname()

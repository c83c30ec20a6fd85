"""Start the heartbeat of a process group on gloo, with a store, names and a watcher."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.util import Finalize  # unlike weakref's, it runs when a child process ends too

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]

from seqpar.comm.faults.connection import Connection
from seqpar.comm.faults.heartbeat import (
    MAX_STORE_INTERVALS,
    GroupStore,
    Heartbeat,
    PeerError,
    Watchers,
    interval,
    store_lost,
)
from seqpar.comm.faults.liveness import start_watcher
from seqpar.core.torch_private import timeout_of

_UNUSED_TAG = 0x5E9  # no message has this tag, so receiving with it times out


def heartbeat_in(group: ProcessGroup) -> Heartbeat | None:
    """Start and return this rank's heartbeat in a group on gloo; None for other groups.

    It stops when the group is freed or the process ends.
    """
    if group.size() == 1 or "cpu:gloo" not in dist.get_backend_config(group):
        return None
    alive = weakref.ref(group)
    interrupt = lambda: close_connections(alive())  # noqa: E731
    heartbeat = _started(group, group.get_group_store(), torch.device("cpu"), interrupt)
    # With an exit priority it also runs at exit, which a running thread may abort.
    Finalize(group, heartbeat.stop, exitpriority=0)
    return heartbeat


def heartbeat_for_a_while(
    group: ProcessGroup, name: str, device: torch.device
) -> tuple[Heartbeat, Callable[[], None]]:
    """Start a heartbeat for one wait in a group of any backend; return it and its `stop`.

    All ranks start one of this name together. It interrupts no wait: the waiting code reads its
    `verdict`.
    """
    store = PrefixStore(f"{name}/", group.get_group_store())
    heartbeat = _started(group, store, device, lambda: None)
    return heartbeat, heartbeat.stop


def _started(
    group: ProcessGroup, at: Store, device: torch.device, interrupt: Callable[[], None]
) -> Heartbeat:
    ranks = dist.get_process_group_ranks(group)
    names = [
        f"rank {i}" if i == rank else f"rank {i} (global rank {rank})"
        for i, rank in enumerate(ranks)
    ]
    timeout = timeout_of(group, device).total_seconds()
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store_keeper = "the launcher" if agent else "global rank 0"
    rank, lost = group.rank(), store_lost(store_keeper)
    try:
        store = Connection.open(at, MAX_STORE_INTERVALS * interval(timeout, len(ranks)))
    except RuntimeError as error:
        doing = f"{names[rank]} was making a module for this group"
        raise PeerError(f"{lost}. {doing}. The store said: {error}") from error
    watchers = Watchers(start_watcher(store.host))
    heartbeat = Heartbeat(GroupStore(store, lost), rank, names, timeout, interrupt, watchers)
    heartbeat.start()
    return heartbeat


def close_connections(group: ProcessGroup | None) -> None:
    """Make all waits on a gloo group raise, here and on the ranks that wait for this one.

    The group's abort() does not end waits, but a receive that times out closes all connections. A
    receive from a peer whose connection is closed already fails without a timeout.
    """
    if group is None:
        return
    for step in range(1, group.size()):
        peer = (group.rank() + step) % group.size()
        try:
            group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "Timed out" in str(error):
                return

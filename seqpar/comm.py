"""The communication seam: the only module that imports torch.distributed.

Everything that moves goes through `Comm.exchange`: messages to some peers, messages from others, posted at once and waited
for later. Peers are group ranks. On gloo, point-to-point messages are 3 to 6 times as fast as all_gather and reduce_scatter.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize  # unlike weakref's, it also runs when a process of multiprocessing ends
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from seqpar.liveness import Heart

Message = tuple[int, Tensor]  # (peer, tensor)
_NOBODYS_TAG = 0x5E9  # of messages that are never sent


class Pending:
    """Messages under way. Their tensors must not be touched before `wait` returns."""

    def __init__(self, works: list[dist.Work], tensors: list[Tensor]) -> None:
        self._works, self._tensors = works, tensors
        self.watch: Callable[[], AbstractContextManager[None]] = nullcontext  # what to wait under

    def wait(self) -> None:
        with self.watch():
            for work in self._works:
                work.wait()
        self._works, self._tensors = [], []  # buffers are freed as soon as their owner drops them


class Comm:
    """A group as one of its ranks sees it. `sent_bytes` and `sent_messages` count what this rank has sent so far."""

    _alive: ClassVar[weakref.WeakValueDictionary[str, Comm]] = weakref.WeakValueDictionary()

    def __init__(self, name: str, rank: int, size: int, group: ProcessGroup | None = None) -> None:
        self.name, self.rank, self.size = name, rank, size
        # weak: a group that outlives destroy_process_group is torn down with the interpreter, which may abort
        self._group = (lambda: None) if group is None else weakref.ref(group)
        self.sent_bytes = self.sent_messages = 0
        self._heart = None if group is None or size == 1 else _heart(self, group)
        self.doing = ""  # the strategy and its pass, as in "ring backward": what errors and traces call an exchange by

    def __deepcopy__(self, memo: object) -> Comm:
        return self  # a module that is copied stays in its group

    @classmethod
    def of(cls, group: Group) -> Comm:
        """The seam for a process group or a 1-D device mesh: the same object for the same group."""
        if isinstance(group, Comm):
            return group
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(f"group must be a process group or a 1-D device mesh, got a mesh of {group.ndim} dimensions")
            group = group.get_group()
        if not isinstance(group, ProcessGroup):
            raise ValueError(f"group must be a process group (of which this process is a member) or a 1-D mesh, got {group!r}")
        name = group.group_name
        known = cls._alive.get(name)
        if known is None or known._group() is not group:
            known = cls._alive[name] = cls(name, dist.get_rank(group), dist.get_world_size(group), group)
        return known

    def exchange(self, sends: Iterable[Message], recvs: Iterable[Message], step: int = 0) -> Pending:
        """Post messages: contiguous tensors to send, and contiguous tensors to receive into. Returns at once.

        Messages between two ranks arrive in the order in which both post them. Empty ones are not sent. `step` is the step
        of the strategy that needs them.
        """
        sends = [(peer, tensor) for peer, tensor in sends if tensor.numel()]
        recvs = [(peer, tensor) for peer, tensor in recvs if tensor.numel()]
        self.sent_bytes += sum(tensor.nbytes for _, tensor in sends)
        self.sent_messages += len(sends)
        if not sends and not recvs:
            return Pending([], [])
        watch: Callable[[], AbstractContextManager[None]] = nullcontext
        if self._heart is not None and (sends or recvs)[0][1].is_cpu:  # NCCL has a watchdog of its own
            watch = partial(self._heart.watch, f"step {step} of {self.doing}", {peer for peer, _ in [*recvs, *sends]})
        with watch():
            pending = self._post(sends, recvs, step)
        pending.watch = watch
        return pending

    def _post(self, sends: list[Message], recvs: list[Message], step: int) -> Pending:
        group = self._group()
        if group is None:
            raise RuntimeError(f"the process group {self.name!r} has been destroyed")
        operations = [
            dist.P2POp(operation, tensor, dist.get_global_rank(group, peer), group)
            for operation, messages in ((dist.irecv, recvs), (dist.isend, sends))  # gloo: receives first
            for peer, tensor in messages
        ]
        return Pending(dist.batch_isend_irecv(operations), [tensor for _, tensor in sends + recvs])

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's `x`, all of one shape, in rank order."""
        x = x.contiguous()
        gathered = [x if peer == self.rank else torch.empty_like(x) for peer in range(self.size)]
        others = [peer for peer in range(self.size) if peer != self.rank]
        self.exchange([(peer, x) for peer in others], [(peer, gathered[peer]) for peer in others]).wait()
        return gathered


def _heart(comm: Comm, group: ProcessGroup) -> Heart | None:
    """The heartbeat of this rank in a group on gloo, until `comm` or the group is no more."""
    if "cpu:gloo" not in dist.get_backend_config(group):
        return None
    ranks = dist.get_process_group_ranks(group)
    names = [f"rank {i}" if i == rank else f"rank {i} (global rank {rank})" for i, rank in enumerate(ranks)]
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    store = group.get_group_store().clone()  # type: ignore[attr-defined]
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host = "the launcher" if agent else "global rank 0"
    heart = Heart(store, comm.rank, names, timeout.total_seconds(), partial(_interrupt, weakref.ref(group)), host)
    for owner in (comm, group):
        Finalize(owner, heart.stop, exitpriority=0)  # at exit too, where a thread left running may abort the interpreter
    return heart


def _interrupt(group: weakref.ref[ProcessGroup]) -> None:
    """Make all waits on a gloo group raise. Its abort() wakes nothing, but a wait that times out closes all connections."""
    if (alive := group()) is None:
        return
    for peer in range(alive.size()):
        if peer != alive.rank():
            with suppress(RuntimeError):
                alive.recv([torch.empty(1)], peer, _NOBODYS_TAG).wait(timedelta(milliseconds=1))


Group = ProcessGroup | DeviceMesh | Comm

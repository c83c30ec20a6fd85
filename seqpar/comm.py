"""The communication seam: the only module that imports torch.distributed.

Everything that moves goes through `Comm.exchange`: messages to some peers, messages from others, posted at once and waited
for later. Peers are group ranks. On gloo, point-to-point messages are 3 to 6 times as fast as all_gather and reduce_scatter.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize  # unlike weakref's, it also runs when a process of multiprocessing ends
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from seqpar import tracing
from seqpar.liveness import Heart

Message = tuple[int, Tensor]  # (peer, tensor)
Watch = Callable[[], AbstractContextManager[None]]
_NOBODYS_TAG = 0x5E9  # of messages that are never sent


class Pending:
    """Messages under way. Their tensors must not be touched before `wait` returns."""

    def __init__(self, works: list[dist.Work], tensors: list[Tensor]) -> None:
        self._works, self._tensors = works, tensors
        self.watches: list[Watch] = []  # what to wait under

    def wait(self) -> None:
        with ExitStack() as stack:
            for watch in self.watches:
                stack.enter_context(watch())
            for work in self._works:
                work.wait()
        self._works, self._tensors, self.watches = [], [], []  # buffers are freed as soon as their owner drops them


class Comm:
    """A group as one of its ranks sees it. `sent_bytes` and `sent_messages` count what this rank has sent so far.

    `shape` is (ranks,), or that of a 2-D mesh; ranks count along its rows.
    """

    _of_group: ClassVar[weakref.WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], Comm]]] = weakref.WeakKeyDictionary()
    _heart: Heart | None = None

    def __init__(self, name: str, rank: int, size: int, group: ProcessGroup | None = None) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.shape: tuple[int, ...] = (size,)
        # weak: a group that outlives destroy_process_group is torn down with the interpreter, which may abort
        self._group = (lambda: None) if group is None else weakref.ref(group)
        self.sent_bytes = self.sent_messages = 0
        self.doing = ""  # the strategy and its pass, as in "ring backward": what errors and traces call an exchange by

    def __deepcopy__(self, memo: object) -> Comm:
        return self  # a module that is copied stays in its group

    @classmethod
    def of(cls, group: Group) -> Comm:
        """The seam for a process group or a device mesh: the same object for the same group."""
        if isinstance(group, Comm):
            return group
        if isinstance(group, DeviceMesh):
            return cls._of(_all_of(group), tuple(group.shape))
        if not isinstance(group, ProcessGroup):
            raise ValueError(f"group must be a process group (of which this process is a member) or a mesh, got {group!r}")
        return cls._of(group, (group.size(),))

    @classmethod
    def _of(cls, group: ProcessGroup, shape: tuple[int, ...]) -> Comm:
        known = cls._of_group.setdefault(group, {})
        if shape not in known:
            name = "x".join([group.group_name, *map(str, shape[1:])])
            comm = known[shape] = cls(name, dist.get_rank(group), dist.get_world_size(group), group)
            comm.shape = shape
            comm._heart = _heart(group) if len(shape) == 1 else cls._of(group, (comm.size,))._heart
        return known[shape]

    def exchange(self, sends: Iterable[Message], recvs: Iterable[Message], step: int = 0) -> Pending:
        """Post messages: contiguous tensors to send, and contiguous tensors to receive into. Returns at once.

        Messages between two ranks arrive in the order in which both post them. Empty ones are not sent. `step` is the step
        of the strategy that needs them.

        On gloo a message waits for word that its receiver is posted, and that word waits behind what is being sent the same
        way. So an exchange posts its receives first; then it fills links of a known rate as plain sockets do, both ways at
        once, and cutting messages in chunks gains nothing (`benchmarks/seam.py`). Two exchanges at once, of which one sends
        to a peer and the other receives from it, take turns: they should be one exchange.
        """
        return Pending([], []) if tracing.silent else self._exchange(sends, recvs, step)

    def _exchange(self, sends: Iterable[Message], recvs: Iterable[Message], step: int = 0) -> Pending:
        sends = [(peer, tensor) for peer, tensor in sends if tensor.numel()]
        recvs = [(peer, tensor) for peer, tensor in recvs if tensor.numel()]
        self.sent_bytes += sum(tensor.nbytes for _, tensor in sends)
        self.sent_messages += len(sends)
        if not sends and not recvs:
            return Pending([], [])
        watch: Watch = nullcontext
        if self._heart is not None and (sends or recvs)[0][1].is_cpu:  # NCCL has a watchdog of its own
            watch = partial(self._heart.watch, f"step {step} of {self.doing}", {peer for peer, _ in [*recvs, *sends]})
        with watch():
            pending = self._post(sends, recvs, step)
        pending.watches = [watch]
        if tracing.current is not None:
            pending.watches.append(tracing.Flight(self.doing, step, self.rank, sends, recvs).waiting)
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

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [peer for peer in range(self.size) if peer != self.rank]

    @property
    def device(self) -> torch.device:
        """Where tensors must be that are sent for the group's own purposes."""
        group = self._group()
        on_cpu = group is None or "cpu:" in dist.get_backend_config(group)
        return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text, in rank order."""
        data = text.encode()
        longest = max(int(size) for size in self.all_gather(torch.tensor([len(data)], device=self.device)))
        padded = torch.tensor(list(data.ljust(longest)), dtype=torch.uint8, device=self.device)
        return [bytes(x.tolist()).decode() for x in self.all_gather(padded)]

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's `x`, all of one shape, in rank order."""
        x = x.contiguous()
        gathered = [x if peer == self.rank else torch.empty_like(x) for peer in range(self.size)]
        self._exchange([(peer, x) for peer in self.others], [(peer, gathered[peer]) for peer in self.others]).wait()
        return gathered


class Part(Comm):
    """Some ranks of a group, who number themselves in the order given; what they send counts as the group's."""

    def __init__(self, whole: Comm, ranks: Sequence[int], name: str) -> None:
        super().__init__(f"{whole.name}/{name}", ranks.index(whole.rank), len(ranks))
        self._whole, self._ranks, self.doing = whole, ranks, f"{whole.doing}, {name}"

    def exchange(self, sends: Iterable[Message], recvs: Iterable[Message], step: int = 0) -> Pending:
        sends, recvs = ([(self._ranks[peer], tensor) for peer, tensor in part] for part in (sends, recvs))
        doing, self._whole.doing = self._whole.doing, self.doing
        try:
            return self._whole.exchange(sends, recvs, step)
        finally:
            self._whole.doing = doing


def _all_of(mesh: DeviceMesh) -> ProcessGroup:
    """The group of all ranks of a mesh, in the order of its rows."""
    if mesh.ndim == 1:
        return mesh.get_group()
    world = dist.group.WORLD
    if world is not None and mesh.mesh.flatten().tolist() == dist.get_process_group_ranks(world):
        return world
    return mesh._flatten().get_group()


def _heart(group: ProcessGroup) -> Heart | None:
    """The heartbeat of this rank in a group on gloo, until the group is no more."""
    if group.size() == 1 or "cpu:gloo" not in dist.get_backend_config(group):
        return None
    ranks = dist.get_process_group_ranks(group)
    names = [f"rank {i}" if i == rank else f"rank {i} (global rank {rank})" for i, rank in enumerate(ranks)]
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    store = group.get_group_store().clone()  # type: ignore[attr-defined]
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host = "the launcher" if agent else "global rank 0"
    heart = Heart(store, group.rank(), names, timeout.total_seconds(), partial(_interrupt, weakref.ref(group)), host)
    Finalize(group, heart.stop, exitpriority=0)  # at exit too, where a thread left running may abort the interpreter
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

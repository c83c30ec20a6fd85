"""The communication seam: the only module that imports torch.distributed.

Everything that moves goes through `Comm.exchange`: messages to some peers, messages from others, posted at once and waited
for later. Peers are group ranks. On gloo, point-to-point messages are 3 to 6 times as fast as all_gather and reduce_scatter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from seqpar import tracing

Message = tuple[int, Tensor]  # (peer, tensor)


class Pending:
    """Messages under way. Their tensors must not be touched before `wait` returns."""

    def __init__(self, works: list[dist.Work], tensors: list[Tensor]) -> None:
        self._works, self._tensors = works, tensors
        self.flight: tracing.Flight | None = None

    def wait(self) -> None:
        if self.flight is not None:
            self.flight.waits()
        for work in self._works:
            work.wait()
        if self.flight is not None:
            self.flight.ends()
        self._works, self._tensors = [], []  # buffers are freed as soon as their owner drops them


class Comm:
    """A group as one of its ranks sees it. `sent_bytes` and `sent_messages` count what this rank has sent so far.

    `shape` is (ranks,), or that of a 2-D mesh; ranks count along its rows.
    """

    _alive: ClassVar[weakref.WeakValueDictionary[str, Comm]] = weakref.WeakValueDictionary()

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
        name = "x".join([group.group_name, *map(str, shape[1:])])
        known = cls._alive.get(name)
        if known is None or known._group() is not group:
            known = cls._alive[name] = cls(name, dist.get_rank(group), dist.get_world_size(group), group)
            known.shape = shape
        return known

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
        pending = self._post(sends, recvs, step)
        if tracing.current is not None:
            pending.flight = tracing.Flight(self.doing, step, self.rank, sends, recvs)
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
        others = [peer for peer in range(self.size) if peer != self.rank]
        self._exchange([(peer, x) for peer in others], [(peer, gathered[peer]) for peer in others]).wait()
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


Group = ProcessGroup | DeviceMesh | Comm

"""`Comm`: a group of ranks, and the exchange of messages in it.

All messages of seqpar are sent by `Comm.exchange`. In an *exchange*, a rank posts several messages
together: the messages that it sends, and the messages that it receives. The rank waits for these
messages later. A *peer* is another rank of the group. On gloo, exchanges are 3 to 6 times as fast
as the collectives all_gather and reduce_scatter.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from functools import partial
from threading import RLock, current_thread
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh as DeviceMesh

from seqpar.comm.faults.heartbeat import Heartbeat, PeerError, heartbeat_in
from seqpar.comm.messages import channels, message_header
from seqpar.comm.messages.channels import Communicators
from seqpar.comm.messages.message_header import (
    NO_DIGEST,
    OUTSIDE,
    AwaitedHeader,
    CallNumbers,
    Exchange,
    Message,
)
from seqpar.core.arguments import shown
from seqpar.core.hooks import hooks, set_hooks
from seqpar.core.torch_private import flat_mesh

WaitContext = Callable[[], AbstractContextManager[None]]


class Pending:
    """Posted messages. Do not read or write their tensors before `wait` has returned."""

    def __init__(
        self,
        works: list[dist.Work],
        messages: list[list[Message]],
        check: Callable[[], None] | None = None,
        error_of: Callable[[Exception], Exception] | None = None,
    ) -> None:
        """Store messages that were posted, and wait for them later.

        Args:
            works: the handles that the backend returned.
            messages: the messages. This object keeps their tensors alive.
            check: a function that raises an error if a peer sends messages that this rank does not
                expect.
            error_of: a function that returns the error to raise in place of an error of the
                backend.
        """
        self._works, self._messages, self._check = works, messages, check
        self._error_of = error_of
        # `wait` runs in these contexts. They name the rank at fault, and record traces.
        self.contexts: list[WaitContext] = []

    def wait(self) -> None:
        """Wait until received tensors are complete and sent tensors may be overwritten."""
        if self.contexts:
            with self.contexts.pop(0)():
                self.wait()
            return
        if self._check is not None:
            self._check()
        try:
            for work in self._works:
                work.wait()
        except dist.DistBackendError as error:
            if self._error_of is None:
                raise
            raise self._error_of(error) from error
        # The references are dropped, so that a tensor is freed when its owner drops it.
        self._works, self._messages, self._check = [], [], None


class Arriving:
    def __init__(self, tensors: list[Tensor], pending: Pending) -> None:
        self._tensors, self._pending = tensors, pending

    def wait(self) -> list[Tensor]:
        self._pending.wait()
        arrived, self._tensors = self._tensors, []
        return arrived


class Comm:
    """A group of ranks, with which one of these ranks sends and receives messages.

    Attributes:
        name: the name of the group, which is the same on all ranks.
        rank: this process's rank in the group. Ranks of a mesh are counted along its rows, even if
            the process group has a different order.
        size: the number of ranks.
        shape: (size,), or the shape of a mesh.
        numbers: the numbers of the current call (`CallNumbers`), or `OUTSIDE` if there is no call.
        digest: the digest of the call's arguments, which headers contain.
    """

    numbers = OUTSIDE
    digest = NO_DIGEST
    _heartbeat: Heartbeat | None = None
    # sends the messages; if None, `Communicators.carrier` chooses
    _channel: ProcessGroup | None = None
    # Relays messages (`relays.py`). If None, messages are sent directly.
    _router: Router | None = None

    def __init__(self, name: str, rank: int, size: int, group: ProcessGroup | None = None) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.shape: tuple[int, ...] = (size,)
        self._order: Sequence[int] = range(size)  # for each rank, its rank in the process group
        self._communicators = Communicators()  # shared by all Comms of a group
        # The reference is weak. A strong reference would keep the group alive after
        # destroy_process_group. A group that is destroyed at the end of the interpreter may abort
        # the process.
        self._group = (lambda: None) if group is None else weakref.ref(group)
        self._calls = [0] * size  # numbers of calls, shared by all Comms of a group
        self._turn = RLock()  # held by the thread that makes a call; shared by all Comms of a group
        # the results of `have_equal`; shared by all Comms of a group
        self._equal: dict[str, bool] = {}
        # How much was sent so far. Comms that `call` and `channel` return share this counter.
        self._sent: Counter[str] = Counter()

    def __deepcopy__(self, memo: object) -> Comm:
        return self  # a copied module stays on its group

    @classmethod
    def of(cls, group: Group) -> Comm:
        """Return the Comm of a process group or a mesh. The same group always has the same Comm."""
        if isinstance(group, Comm):
            return group
        if isinstance(group, DeviceMesh):
            return cls._of(*_group_of_mesh(group), tuple(group.shape))
        if not isinstance(group, ProcessGroup):
            expected = "a process group (of which this process is a member) or a mesh"
            way_out = "torch.distributed.group.WORLD is the group of all ranks"
            if not (dist.is_available() and dist.is_initialized()):
                way_out = f"first call torch.distributed.init_process_group; then {way_out}"
            raise ValueError(f"group must be {expected}, got {shown(group)}: {way_out}")
        return cls._of(group, tuple(range(group.size())), (group.size(),))

    @classmethod
    def _of(cls, group: ProcessGroup, order: tuple[int, ...], shape: tuple[int, ...]) -> Comm:
        known, ascending = _comms.setdefault(group, {}), tuple(range(group.size()))
        if (order, shape) not in known:
            name = "x".join([group.group_name, *map(str, shape[1:])])
            if order != ascending:
                name += f"{list(order)}"
            comm = cls(name, order.index(group.rank()), len(order), group)
            comm.shape, comm._order = shape, order
            if (order, shape) == (ascending, (comm.size,)):
                comm._heartbeat = heartbeat_in(group)
            else:
                plain = cls.of(group)
                comm._heartbeat, comm._calls = plain._heartbeat, plain._calls
                comm._turn, comm._equal = plain._turn, plain._equal
                comm._communicators = plain._communicators
            known[order, shape] = comm
        return known[order, shape]

    @property
    def is_routed(self) -> bool:
        """Whether this rank may relay messages of other ranks. If so, this rank takes part in every
        exchange.
        """
        return self._router is not None

    @property
    def sent_bytes(self) -> int:
        """How many bytes this rank has sent so far, without headers (`message_header.py`)."""
        return self._sent["bytes"]

    @property
    def sent_messages(self) -> int:
        return self._sent["messages"]

    def call(self, numbers: Tensor | None = None) -> Comm:
        """Return the Comm for a new call. With the `numbers` of a forward, return the Comm for the
        backward of the forward's call.
        """
        of_call, own = copy(self), self._order[self.rank]
        of_call.numbers = CallNumbers(self._calls, own, numbers)
        return of_call

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Raise a ValueError if a different thread is making a call on this group now.

        If other ranks wait for messages of the refused call, these ranks raise a PeerError that
        contains the message of the ValueError.
        """
        if self.size == 1:
            yield
        elif self._turn.acquire(blocking=False):
            try:
                yield
            finally:
                self._turn.release()
        else:
            self._refuse_thread()

    def _refuse_thread(self) -> NoReturn:
        refused = (
            f"group must be used by one thread at a time: on rank {self.rank} of {self.size}, the "
            f"thread {current_thread().name!r} began a call while another thread's call ran. Calls "
            "on a group have one order, the same on all ranks: let one thread make them, or make a "
            "group for each thread with dist.new_group"
        )
        if self._heartbeat is not None:
            self._heartbeat.accuse(refused)
        raise ValueError(refused)

    def join(self, device: torch.device) -> None:
        """Make the group's communicator for this device. All ranks must make the first call
        together.

        Every attention call begins with this method, because some ranks may have no messages in the
        first call.
        """
        group = self._group()
        if group is not None and self._heartbeat_for(device) is None:
            self._communicators.join(group, device)

    def sends_from(self, device: torch.device) -> bool:
        group = self._group()
        if group is None or self._heartbeat_for(device) is not None:
            return True
        return self._communicators.expected(group, device) is None

    def check_device(self, name: str, device: torch.device) -> None:
        if not self.sends_from(device):
            expected = self._communicators.expected(self.process_group, device)
            raise ValueError(f"{name} must be on {expected}, got one on {device}")

    def channel(self, name: str) -> Comm:
        """Return a Comm whose messages do not wait for messages of this Comm.

        The new Comm has the same ranks. On NCCL, it has a separate communicator, which all ranks
        make together when they first request `name`. All ranks must therefore request the same
        names in the same order, before the first message of a call. A communicator takes a few
        hundred MB of memory on each GPU, and is freed when the group is freed.

        On gloo, messages do not wait for each other, so this method returns this Comm itself.
        `sent_bytes` of this Comm also counts the messages of the new Comm.
        """
        group = self._group()
        through = None if group is None else self._communicators.channel(group, name)
        if through is None:
            return self
        channel = copy(self)
        channel._channel = through
        return channel

    def exchange(
        self, sends: Iterable[Message], recvs: Iterable[Message], *, label: str, step: int = 0
    ) -> Pending:
        """Post messages and return immediately.

        All tensors must be contiguous. Two ranks must post the exchanges between them in the same
        order. Empty messages are not sent.

        On gloo, waiting raises a PeerError if two ranks are in different exchanges, or if they
        expect different sizes or dtypes. On gloo, a send to a peer and a receive from this peer use
        the link at the same time only if they are posted as a single exchange.

        Args:
            sends, recvs: the messages as (peer, tensor).
            label: the strategy and the pass, such as "ring backward".
            step: the step of the strategy that needs the messages. In errors and traces, an
                exchange is named by its label and its step.
        """
        if hooks().skip_messages:
            return Pending([], [])
        return self._exchange(sends, recvs, label, step)

    def _exchange(
        self, sends: Iterable[Message], recvs: Iterable[Message], label: str, step: int = 0
    ) -> Pending:
        outgoing = [message for message in sends if message[1].numel()]
        incoming = [message for message in recvs if message[1].numel()]
        exchange = Exchange(self.numbers.own, label, step)
        if self._router is not None:
            pending = self._router(self, outgoing, incoming, exchange)
        elif outgoing or incoming:
            self._sent["messages"] += len(outgoing)
            for _, x in outgoing:
                self._sent["bytes"] += x.nbytes
            pending = self.start(outgoing, incoming, exchange)
        else:
            return Pending([], [])
        if (trace := hooks().trace) is not None and (outgoing or incoming):
            traced = trace.exchange(label, step, self.rank, outgoing, incoming)
            pending.contexts.append(traced)
        return pending

    def tell_error(self, error: BaseException) -> None:
        """Make ranks that wait for this rank raise a PeerError that contains this rank's error.

        The group's heartbeat reports the error to the waiting ranks within seconds. Heartbeats
        exist only on gloo. This method sends no message and does not wait. If all ranks raise the
        error, the group remains usable.
        """
        if self._heartbeat is not None:
            self._heartbeat.report(error)

    @contextmanager
    def telling_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.tell_error(error)
            raise

    def count(self, messages: int, size: int) -> None:
        self._sent["bytes"] += size
        self._sent["messages"] += messages

    def start(self, sends: list[Message], recvs: list[Message], exchange: Exchange) -> Pending:
        """Post messages that are not empty. If waiting for them fails, the error names the rank at
        fault.
        """
        group, device = self.process_group, (sends or recvs)[0][1].device
        if (heartbeat := self._heartbeat_for(device)) is None:
            coalesced = self._communicators.coalesces(group, device)
            through = self._channel or self._communicators.carrier(group, device)
            error_of = partial(self._watchdog_error, exchange)
            try:
                works = channels.post(through, device, sends, recvs, self._order, coalesced)
            except dist.DistBackendError as error:
                raise error_of(error) from error
            return Pending(works, [sends, recvs], error_of=error_of)
        order = self._order
        named_sends, named_recvs = (
            [(order[peer], x) for peer, x in part] for part in (sends, recvs)
        )
        numbers = {peer: self.numbers.between(peer) for peer, _ in (*named_sends, *named_recvs)}
        blame = partial(heartbeat.blame_on_failure, str(exchange), set(numbers))
        with blame():
            works, headers = message_header.post(
                group, exchange, numbers, named_sends, named_recvs, self.digest.table
            )
        pending = Pending(works, [sends, recvs], partial(self._check, headers))
        pending.contexts.append(blame)
        return pending

    def _check(self, headers: list[AwaitedHeader]) -> None:
        """Wait for the headers of peers. Raise a PeerError if a peer is in a different exchange."""
        assert self._heartbeat is not None
        names = self._heartbeat.names
        for awaited in headers:
            awaited.work.wait()
            if awaited.received != awaited.expected:
                own = names[self._order[self.rank]]
                cause = message_header.disagreement(awaited, names[awaited.peer], own, self.digest)
                raise PeerError(self._heartbeat.accuse(cause))

    def _watchdog_error(self, exchange: Exchange, error: Exception) -> PeerError:
        doing = f"rank {self.rank} was in {exchange} of {self.size} ranks"
        return PeerError(f"a rank or its link failed. {doing}. The backend said: {error}")

    def has_headers(self, device: torch.device) -> bool:
        """Return whether messages from a device have headers, as on gloo."""
        return self._heartbeat_for(device) is not None

    def runs_in_order(self, device: torch.device) -> bool:
        """Return whether an exchange may send what an earlier exchange receives, as on NCCL."""
        return device.type == "cuda"

    def _heartbeat_for(self, device: torch.device) -> Heartbeat | None:
        """Return the heartbeat that watches messages from a device. NCCL has its own watchdog, so
        the result is None for a GPU on NCCL.
        """
        return self._heartbeat if self._heartbeat and device.type == "cpu" else None

    @property
    def process_group(self) -> ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError(f"the process group {self.name!r} has been destroyed")
        return group

    @property
    def processes(self) -> list[int]:
        """The global ranks of the group, in the order of their ranks in the process group."""
        return dist.get_process_group_ranks(self.process_group)

    @property
    def peers(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    @property
    def device(self) -> torch.device:
        """The device for digests and sizes: the CPU if the group can send from it, else the GPU."""
        group = self._group()
        if group is None or "cpu:" in dist.get_backend_config(group):
            return torch.device("cpu")
        return self._communicators.gpu(group) or torch.device("cuda", torch.cuda.current_device())

    def synchronize(self) -> None:
        """Wait until this process's GPU, if it has one, has finished all of its work."""
        if torch.cuda.is_initialized():
            group = self._group()
            torch.cuda.synchronize(None if group is None else self._communicators.gpu(group))

    def all_gather_text(self, text: str, *, label: str) -> list[str]:
        if self.numbers is OUTSIDE:
            return self.call().all_gather_text(text, label=label)
        data = text.encode()
        sizes = self.all_gather(torch.tensor([len(data)], device=self.device), label=label)
        padded = data.ljust(max(map(int, sizes)))
        tensor = torch.tensor(list(padded), dtype=torch.uint8, device=self.device)
        return [bytes(x.tolist()).decode() for x in self.all_gather(tensor, label=label)]

    def all_gather(self, x: Tensor, *, label: str) -> list[Tensor]:
        """Return the tensors `x` of all ranks, in the order of the ranks. They must have the same
        shape.

        Each of P ranks sends ⌈log₂ P⌉ messages, which together are P − 1 times as large as x. If no
        call of attention is running, the exchange counts as a separate call. The algorithm is from
        Bruck et al., "Efficient Algorithms for All-to-All Communications" (1997), section 4.
        """
        if self.numbers is OUTSIDE:
            return self.call().all_gather(x, label=label)
        self.join(x.device)
        # by rank, beginning with this rank and wrapping around
        gathered = x.new_empty((self.size, *x.shape))
        gathered[0] = x.detach()
        for step, distance, to, source in self._doubling():
            sent = gathered[: self.size - distance][:distance]
            received = gathered[distance : 2 * distance]
            self._exchange([(to, sent)], [(source, received)], label, step).wait()
        # The results are copies, because torch.set_rng_state fails with a view that has an offset.
        return [gathered[(peer - self.rank) % self.size].clone() for peer in range(self.size)]

    def have_equal(self, name: str, text: str) -> bool:
        """Return whether all ranks have the same `text`.

        Only the first call with a `name` on the group sends messages. All ranks must make this call
        at the same point of their programs. Later calls return the result of the first call, and
        ignore `text`. The messages are neither counted nor traced.
        """
        if self._group() is None:  # all ranks are in this process
            return True
        if name not in self._equal:
            straight = copy(self)
            straight._router = None  # the router knows only messages of the strategy's call
            straight._sent = Counter()
            with set_hooks(traces=()):
                self._equal[name] = len({*straight.all_gather_text(text, label=name)}) == 1
        return self._equal[name]

    def maximum(self, x: Tensor, *, label: str) -> Tensor:
        """Return the elementwise maximum of the `x` of all ranks.

        Each of P ranks sends ⌈log₂ P⌉ messages of the size of x.
        """
        if self.numbers is OUTSIDE:
            return self.call().maximum(x, label=label)
        self.join(x.device)
        for step, _, to, source in self._doubling():
            received = torch.empty_like(x)
            self._exchange([(to, x)], [(source, received)], label, step).wait()
            x = x.maximum(received)
        return x

    def _doubling(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (step, distance, receiver, sender) for exchanges between ranks whose distance is 1,
        2, 4 and so on.

        After the last exchange, the data of each rank depend on the data of all ranks.
        """
        for step in range((self.size - 1).bit_length()):
            distance = 2**step
            to, source = self.rank - distance, self.rank + distance
            yield step, distance, to % self.size, source % self.size


class SubComm(Comm):
    """A group that consists of some ranks of a larger group, numbered in the order of `ranks`.

    The larger group's Comm sends and counts the messages. The `label` that is passed to `exchange`
    is replaced by the `label` and `name` of this object, as in "usp forward, ring".
    """

    def __init__(self, whole: Comm, ranks: Sequence[int], name: str, label: str) -> None:
        super().__init__(f"{whole.name}/{name}", ranks.index(whole.rank), len(ranks))
        self._whole, self._ranks, self._label = whole, ranks, f"{label}, {name}"

    @property
    def is_routed(self) -> bool:
        return self._whole.is_routed

    def exchange(
        self, sends: Iterable[Message], recvs: Iterable[Message], *, label: str, step: int = 0
    ) -> Pending:
        sends, recvs = (
            [(self._ranks[peer], tensor) for peer, tensor in messages]
            for messages in (sends, recvs)
        )
        return self._whole.exchange(sends, recvs, label=self._label, step=step)

    def have_equal(self, name: str, text: str) -> bool:
        return self._whole.have_equal(name, text)

    def channel(self, name: str) -> SubComm:
        channel = copy(self)
        channel._whole = self._whole.channel(name)
        return channel


def as_mesh(comm: Comm, *shape: int) -> Comm:
    """Return a Comm with the same ranks as a mesh of the given shape, counted along its rows.

    The new Comm counts its own bytes.
    """
    group = comm._group()
    if group is not None:
        return Comm._of(group, tuple(comm._order), shape)
    mesh = copy(comm)
    mesh.name, mesh.shape = "x".join([comm.name, *map(str, shape[1:])]), shape
    return mesh


def _group_of_mesh(mesh: DeviceMesh) -> tuple[ProcessGroup, tuple[int, ...]]:
    """Return the process group of a mesh, and the rank in this group for each rank of the mesh.

    The two ranks may differ, because torch sorts the ranks of a group.
    """
    ranks, world = mesh.mesh.flatten().tolist(), dist.group.WORLD
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh must have this process (global rank {dist.get_rank()}), got {mesh}")
    if mesh.ndim == 1:
        group = mesh.get_group()
    elif world is not None and sorted(ranks) == dist.get_process_group_ranks(world):
        group = world
    elif mesh.mesh_dim_names is None:
        reason = "to make a group of some of the ranks"
        raise ValueError(f"mesh must have mesh_dim_names {reason}, got {mesh}")
    else:
        group = flat_mesh(mesh).get_group()
    in_group = dist.get_process_group_ranks(group)
    return group, tuple(map(in_group.index, ranks))


Group = ProcessGroup | DeviceMesh | Comm
"""The ranks that a module computes with: a process group or a device mesh."""

Router = Callable[[Comm, list[Message], list[Message], Exchange], Pending]
_comms: weakref.WeakKeyDictionary[ProcessGroup, dict[tuple[tuple[int, ...], ...], Comm]]
_comms = weakref.WeakKeyDictionary()

"""Virtual ranks under NCCL's rules, in virtual time: they show deadlocks and what overlaps.

The rules are these. All ranks of a communicator make it together at its first use, and each rank
waits until all of them have used it. The exchanges of a communicator run one after another, in the
order in which they are posted. An exchange starts when the stream that posted it reaches this
point. It ends when all of its messages are matched and have arrived. A rank that waits for an
exchange lets its current stream wait for it.

Results are really computed; the virtual time of each computation is given.
"""

import contextlib
import copy
import threading
from functools import partial
from unittest import mock

from seqpar.comm.messages.comm import Pending
from seqpar.core import background
from seqpar.core.hooks import set_hooks
from seqpar.tracing.trace import Event
from tests.support.nccl_exchanges import Message, Posted, Speeds
from tests.support.ranks import Mail, VirtualComm, as_here, threads_of_a_core

_INSTANT = Speeds()
_TIMEOUT = 60.0  # seconds that a rank may compute while all others wait


class Deadlock(AssertionError):
    """No rank can go on. The message says which rank waits for what."""


class _Group:
    """The ranks of a communicator."""

    def __init__(self, name, ranks):
        self.name, self.ranks, self.mail = name, tuple(ranks), [Mail() for _ in ranks]
        self.arrived, self.messages = set(), {}  # ranks that have joined; message by its key


class World:
    """All ranks and their streams.

    `events` are the computes, waits and flights on the streams, as in traces, but in virtual
    seconds.
    """

    def __init__(self, ranks, speeds, one_at_a_time):
        self.speeds, self._one_at_a_time = speeds, one_at_a_time
        self.events, self.now = [], [0.0] * ranks  # when the current stream of each rank is done
        self._last, self._open, self._groups = {}, [], {}
        self._changed, self._report = threading.Condition(), None
        self._alive = set(range(ranks))
        self._blocked = {}  # rank: functions (can it go on, what does it wait for)
        self._local, self._labels = threading.local(), {}

    def comm(self, name, ranks, rank):
        """Return a rank's Comm of the group `name`; `ranks` are numbers in the world."""
        with self._changed:
            group = self._groups.setdefault(name, _Group(name, ranks))
        return NcclComm(self, group, group.ranks.index(rank))

    def run(self, function, *arguments):
        """Run function(comm, *arguments) on all ranks at once; return the results in order."""
        ranks = range(len(self.now))

        def on_rank(rank):
            self._local.rank = rank
            try:
                result = function(self.comm("world", ranks, rank), *arguments)
                self._synchronize(rank)
                return result
            finally:
                with self._changed:
                    self._alive.discard(rank)
                    self._changed.notify_all()

        scan = mock.patch.object(background, "threads", partial(_Fork, self))
        threads = threads_of_a_core(len(ranks))
        with set_hooks(traces=(self,)), scan, threads:
            played = [as_here(partial(on_rank, rank)) for rank in ranks]
            futures = [threads.submit(play) for play in played]
        errors = [future.exception() for future in futures if future.exception() is not None]
        if errors:  # a rank that raises lets other ranks wait: prefer its error
            raise min(errors, key=lambda error: isinstance(error, Deadlock))
        return [future.result() for future in futures]

    @property
    def rank(self):
        """The rank that the current thread runs."""
        return self._local.rank

    def begin(self, label, rank):
        """Record that the current thread's rank begins a pass (a method of `Recorder`)."""
        self._labels[self.rank] = label

    def compute(self, start, stop, work):
        """Let the current thread's rank compute an area (a method of `Recorder`)."""
        area = work.area
        label = self._labels[self.rank]
        times = self.speeds.backward if label.endswith("backward") else 1.0
        self.work(self.rank, area * self.speeds.area * times, label, area)

    def exchange(self, *_):
        """Record nothing (a method of `Recorder`): `post` records exchanges."""
        return contextlib.nullcontext

    def work(self, rank, seconds, what="compute", area=0):
        """Let a rank's current stream compute for this many seconds."""
        start, self.now[rank] = self.now[rank], self.now[rank] + seconds
        self.events.append(Event("compute", what, 0, start, self.now[rank], rank, area=area))

    def join(self, group, rank):
        """Wait until all ranks of the group have joined its communicator."""

        def missing():
            absent = sorted(set(group.ranks) - group.arrived)
            return f"the communicator of {group.name!r}, which ranks {absent} have not used"

        with self._changed:
            group.arrived.add(rank)
            self._changed.notify_all()
            self._wait_until(rank, lambda: len(group.arrived) == len(group.ranks), missing)

    def post(self, group, rank, exchange, keys, sends, recvs):
        """Post an exchange on the group's communicator; `keys` identify its messages."""
        stream = rank if self._one_at_a_time else (rank, group.name)
        with self._changed:
            previous = self._last.get(stream)
            posted = Posted(rank, exchange, self.now[rank], previous, sends, recvs)
            self._last[stream] = posted
            for number, key in enumerate(keys):
                message = group.messages.setdefault(key, Message())
                sending = number < len(sends)
                setattr(message, "sender" if sending else "receiver", posted)
                posted.messages.append(message)
                posted.peers.append(group.ranks[key[1] if sending else key[0]])
            self._open.append(posted)
            while sum(x.settle(self.speeds) for x in self._open):
                self._open = [x for x in self._open if x.stop is None]
            self._changed.notify_all()
        return posted

    def settle(self, posted):
        """Wait until the time at which an exchange stops is known."""
        with self._changed:
            self._wait_until(posted.rank, lambda: posted.stop is not None, posted.why)

    def wait(self, posted):
        """Make the rank's current stream wait for an exchange."""
        self.settle(posted)
        rank, what, step = posted.rank, posted.exchange.label, posted.exchange.step
        start, self.now[rank] = self.now[rank], max(self.now[rank], posted.stop)
        self.events += [
            Event("flight", what, step, posted.start, posted.stop, rank, bytes=posted.sent),
            Event("wait", what, step, start, self.now[rank], rank),
        ]

    def _synchronize(self, rank):
        """Wait, as the host does at the end, for all exchanges that a rank has posted."""
        with self._changed:
            for posted in [x for x in self._open if x.rank == rank]:
                self._wait_until(rank, lambda x=posted: x.stop is not None, posted.why)

    def _wait_until(self, rank, ready, why):
        """Block the rank's thread until `ready()`. Raise a Deadlock if no rank can go on."""
        self._blocked[rank] = ready, why
        self._changed.notify_all()
        while not ready():
            blocked = [self._blocked.get(other) for other in sorted(self._alive)]
            if self._report is None and not any(x is None or x[0]() for x in blocked):
                reasons = {other: self._blocked[other][1]() for other in sorted(self._alive)}
                ended = sorted(set(range(len(self.now))) - self._alive)
                self._report = "\n".join(
                    [f"rank {other} waits for {reason}" for other, reason in reasons.items()]
                    + [f"rank {other} has ended" for other in ended]
                )
                self._changed.notify_all()
            if self._report is not None:
                raise Deadlock(self._report)
            assert self._changed.wait(_TIMEOUT), f"rank {rank} waits for {why()}: nobody moves"
        del self._blocked[rank]


class NcclComm(VirtualComm):
    """A rank of a group under NCCL's rules."""

    def __init__(self, world, group, rank):
        super().__init__(f"nccl{id(world)}.{group.name}.{rank}", rank, len(group.ranks), group.mail)
        self.world, self._nccl, self._channels = world, group, {}
        self._arriving = []  # exchanges whose messages still arrive

    @property
    def global_rank(self):
        """This rank's number in the world."""
        return self._nccl.ranks[self.rank]

    def beside(self, name, ranks):
        """Return this rank's Comm of another group, which has a separate communicator."""
        return self.world.comm(name, ranks, self.global_rank)

    def channel(self, name):
        """Return a further communicator of this group by its name; all ranks make it together."""
        if name not in self._channels:
            self._channels[name] = self.beside(f"{self._nccl.name}/{name}", self._nccl.ranks)
            self._channels[name].join()
        channel, made = copy.copy(self), self._channels[name]
        channel._nccl, channel._mail, channel._counts = made._nccl, made._mail, made._counts
        return channel

    def work(self, seconds):
        """Let this rank's current stream compute for this many seconds."""
        self.world.work(self.global_rank, seconds)

    def join(self, device=None):
        self.world.join(self._nccl, self.global_rank)

    def runs_in_order(self, device):
        return True

    def start(self, sends, recvs, exchange):
        self.join()
        self._arriving[:] = [pending for pending in self._arriving if not pending.settled]
        for pending in self._arriving:  # an exchange reads what it sends when it starts
            if pending.receives_any_of([x for _, x in sends]):
                pending.settle()
        counts = self._counts.copy()
        inner = super().start(sends, recvs, exchange)
        keys = []
        for sending, messages in ((True, sends), (False, recvs)):
            for peer, _ in messages:
                ends = (self.rank, peer) if sending else (peer, self.rank)
                kind = ("sent" if sending else "posted"), peer, exchange.hop
                keys.append((*ends, exchange.hop, counts[kind]))
                counts[kind] += 1
        posted = self.world.post(self._nccl, self.global_rank, exchange, keys, sends, recvs)
        self._arriving.append(_NcclPending(self.world, inner, posted, [x for _, x in recvs]))
        return self._arriving[-1]


class _NcclPending(Pending):
    def __init__(self, world, inner, posted, received):
        super().__init__([], [])
        self._world, self._inner, self._posted = world, inner, posted
        self._received, self.settled = received, False

    def receives_any_of(self, tensors):
        """Whether this exchange writes one of these tensors."""
        return any(_overlap(x, y) for x in self._received for y in tensors)

    def settle(self):
        """Let the messages arrive, without letting the current stream wait for them."""
        self._world.settle(self._posted)
        self._inner.wait()
        self._received, self.settled = [], True

    def wait(self):
        if self._posted is not None:
            self._world.wait(self._posted)
            self.settle()
        self._posted = None


def _overlap(x, y):
    (x_start, x_stop), (y_start, y_stop) = (
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in (x, y)
    )
    return x_start < y_stop and y_start < x_stop


class _Fork:
    """Replaces the threads of background work: the work runs on a separate stream, as on a GPU."""

    def __init__(self, world):
        self._world = world

    def submit(self, function):
        return _Forked(self._world, function)


class _Forked:
    """Work that starts now on a separate stream."""

    def __init__(self, world, function):
        self._now, self._rank = world.now, world.rank
        begun = self._now[self._rank]
        function()
        self._ended, self._now[self._rank] = self._now[self._rank], begun

    def result(self):
        """Make the current stream wait for the end of the work."""
        self._now[self._rank] = max(self._now[self._rank], self._ended)


def nccl(ranks, function, *arguments, speeds=_INSTANT, one_at_a_time=False):
    """Run function(comm, *arguments) on all ranks under NCCL's rules; return (results, world).

    With `one_at_a_time`, a device runs one exchange at a time, even if the exchanges are on
    different communicators. This is the worst case that NCCL's manual warns of: a device with
    resources for only one kernel.
    """
    world = World(ranks, speeds, one_at_a_time)
    return world.run(function, *arguments), world

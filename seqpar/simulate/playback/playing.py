"""Play programs on a cluster: when each rank computes, sends and waits."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from seqpar.core.arguments import shown
from seqpar.costs.cluster import Cluster
from seqpar.simulate.playback.network import Flight, Hardware, Network
from seqpar.simulate.playback.op_costs import Pricing, computes, price
from seqpar.simulate.playback.outcome import Entry, Outcome
from seqpar.simulate.playback.shares import Resource
from seqpar.simulate.recording.program import Begin, Compute, Copy, End, Post, Program, Serve, Wait

if TYPE_CHECKING:
    import simpy


def play(
    programs: Sequence[Program], cluster: Cluster, *, pricing: Pricing | None = None
) -> Outcome:
    """Return when all that the ranks' programs have happens on a cluster.

    Args:
        programs: one for each rank, in order, as `record` returns them. On a cluster of cores that
            move messages themselves (`overlaps` is False) there may be more ranks than cores.
        cluster: the devices and their links. Rank r is as in `Cluster`.
        pricing: what gives each of a list of computes its seconds, by identity. None: the device's
            measured costs.

    Messages set out when both ends have posted them. With programs that were recorded `ordered`,
    the exchanges of a communicator run one after another, as on NCCL; otherwise messages from one
    rank to another do, as on gloo. What shares a link, a NIC or a core gets equal shares of it.
    Posting takes no time. The same arguments give the same outcome.

    Raises:
        ValueError: if `pricing` leaves out a compute; if there are more ranks than devices; if
            messages do not match; if ranks wait for each other for ever, with who waits for what.
        ImportError: without simpy, which the extra "plan" installs.
    """
    programs = list(programs)
    if not isinstance(cluster, Cluster):
        raise TypeError(f"cluster must be a Cluster, got {shown(cluster)}")
    if not programs or not all(isinstance(x, Program) for x in programs):
        raise ValueError(f"programs must be one Program for each rank, got {shown(programs)}")
    if len({x.ordered for x in programs}) > 1:
        raise ValueError("programs must all be ordered, or none of them")
    found = computes(programs)
    seconds = price(cluster.device, found) if pricing is None else _checked(pricing, found)
    hardware = Hardware(cluster, len(programs))

    def run(messages: bool, attention: bool) -> list[list[Entry]]:
        return _Run(programs, hardware, seconds, messages, attention).entries

    return Outcome(programs, run(True, True), run)


def _checked(pricing: Pricing, found: list[Compute]) -> Mapping[int, float]:
    """Return what a pricing says; raise a ValueError unless that is seconds for each compute."""
    seconds = pricing(found)
    for compute in found:
        if not 0 <= seconds.get(id(compute), -1.0) < math.inf:
            at = f"{compute.what!r}, step {compute.step}"
            got = seconds.get(id(compute))
            raise ValueError(f"pricing must give each compute its seconds, got {got} for {at}")
    return seconds


def require_simpy() -> ModuleType:
    """Return the package that keeps the clock; raise an ImportError that says how to install it."""
    try:
        import simpy
    except ImportError as error:
        raise ImportError("simulations need simpy: pip install 'seqpar[plan]'") from error
    return simpy


class _Run:
    """One play; the entries are what each rank did, in the order in which it ended."""

    def __init__(
        self,
        programs: Sequence[Program],
        hardware: Hardware,
        seconds: Mapping[int, float],
        messages: bool,
        attention: bool,
    ) -> None:
        self._env = require_simpy().Environment()  # it begins at 0
        self._hardware, self._seconds = hardware, seconds
        self._messages, self._attention = messages, attention
        self._network = Network(self._env, hardware, programs[0].ordered)
        self.entries: list[list[Entry]] = [[] for _ in programs]
        self._waits: dict[int, Flight] = {}  # for what ranks wait now
        flights: list[dict[int, Flight]] = [{} for _ in programs]
        ranks = [
            self._env.process(self._rank(rank, program, flights[rank]))
            for rank, program in enumerate(programs)
        ]
        self._env.run()
        stuck = {rank: self._waits[rank].post for rank, x in enumerate(ranks) if x.is_alive}
        if stuck:
            reasons = [f"rank {rank} for {x.what!r}, step {x.step}" for rank, x in stuck.items()]
            raise ValueError(f"programs: ranks wait for ever: {'; '.join(reasons[:8])}")

    def _rank(
        self, rank: int, program: Program, flights: dict[int, Flight]
    ) -> Generator[simpy.Event, None, None]:
        """Take a rank's actions one after another."""
        env, entries = self._env, self.entries[rank]
        beside: dict[int, simpy.Process] = {}
        for action in program.actions:
            start = env.now
            if isinstance(action, Compute):
                yield from self._compute(rank, action)
                what = "compute", action.what, action.step, start, env.now
                entries.append(Entry(*what, area=action.area))
            elif isinstance(action, Copy):
                seconds, through = self._hardware.copying(rank, action.nbytes)
                yield from self._take(seconds, through)
                what = "flight", action.what, 0, start, env.now
                entries.append(Entry(*what, bytes=action.nbytes))
            elif isinstance(action, Begin):
                process = env.process(self._rank(rank, action.program, flights))
                beside[id(action.program)] = process
            elif isinstance(action, End):
                yield beside[id(action.program)]
            elif isinstance(action, Serve):
                yield from self._serve(rank, action.programs, flights)
            elif not self._messages:
                continue
            elif isinstance(action, Post):
                flights[action.number] = self._network.post(rank, action)
            else:
                assert isinstance(action, Wait)
                yield from self._wait(rank, flights.pop(action.number))

    def _compute(self, rank: int, action: Compute) -> Generator[simpy.Event, None, None]:
        seconds = self._seconds[id(action)]
        if not seconds or (action.area and not self._attention):
            return
        core = self._hardware.core(rank)
        if core is None:
            yield self._env.timeout(seconds)
        else:
            yield from self._take(seconds, [core])

    def _take(self, seconds: float, through: list[Resource]) -> Generator[simpy.Event, None, None]:
        """Take so many seconds of resources, which others share."""
        ended = self._env.event()

        def end() -> None:
            ended.succeed()

        self._network.shares.start(seconds, through, end)
        yield ended

    def _serve(
        self, rank: int, programs: dict[int, Program], flights: dict[int, Flight]
    ) -> Generator[simpy.Event, None, None]:
        """Run programs in the order in which their exchanges end."""
        if not self._messages:
            for program in programs.values():
                yield from self._rank(rank, program, flights)
            return
        come = require_simpy().Store(self._env)
        left = {number: flights.pop(number) for number in programs}
        for number, flight in left.items():
            if flight.done.callbacks is None:  # it has ended
                come.put(number)
            else:
                flight.done.callbacks.append(partial(_put, come, number))
        while left:
            start = self._env.now
            self._waits[rank] = next(iter(left.values()))
            came: Any = yield come.get()
            self._waited(rank, left.pop(came), start)
            yield from self._rank(rank, programs[came], flights)

    def _wait(self, rank: int, flight: Flight) -> Generator[simpy.Event, None, None]:
        start = self._env.now
        self._waits[rank] = flight
        yield flight.done
        self._waited(rank, flight, start)

    def _waited(self, rank: int, flight: Flight, start: float) -> None:
        """Note that an exchange has ended, for which the rank has waited since then."""
        post, stop = flight.post, self._env.now
        to, source = (tuple(sorted({peer for peer, _ in x})) for x in (post.sends, post.recvs))
        sent = sum(nbytes for _, nbytes in post.sends)
        what = post.what, post.step
        self.entries[rank] += [
            Entry("flight", *what, flight.posted, stop, to, sent),
            Entry("wait", *what, start, stop, source or to),
        ]


def _put(store: simpy.Store, number: int, _: simpy.Event) -> None:
    store.put(number)

"""Play programs on a cluster: compute when each rank computes, sends and waits.

simpy keeps the virtual time.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

from seqpar.core.arguments import as_sequence, shown
from seqpar.core.compiling import outside_graphs
from seqpar.costs.cluster import Cluster, as_cluster
from seqpar.simulate.playback.network import Flight, Hardware, Network
from seqpar.simulate.playback.op_costs import Pricing, computes, price
from seqpar.simulate.playback.outcome import Outcome
from seqpar.simulate.playback.shares import Resource
from seqpar.simulate.recording.program import Begin, Compute, Copy, End, Post, Program, Serve, Wait
from seqpar.tracing.trace import Event

if TYPE_CHECKING:
    import simpy


@outside_graphs
def play(
    programs: Sequence[Program], cluster: Cluster | str, *, pricing: Pricing | None = None
) -> Outcome:
    """Return the times at which ranks compute, send and wait, if a cluster runs the given programs.

    A program is the list of one rank's computations, messages and waits.

    Args:
        programs: one program per rank, in order, as `record` returns them. A cluster of cores that
            move messages themselves (`overlaps` is False) can run more ranks than it has cores.
        cluster: the devices and their links, or the name of a preset. The docstring of `Cluster`
            says on which device each rank runs.
        pricing: a function from the list of all `Compute`s to the seconds of each, by its `id`.
            None stands for the device's measured costs.

    A message starts when both ends have posted it. If the programs were recorded with `ordered`,
    the exchanges of a communicator run one after another, as on NCCL. If they were recorded without
    `ordered`, only messages from the same sender to the same receiver run one after another, as on
    gloo. Computations and messages that use the same link, NIC or core at the same time get equal
    fractions of this resource. Posting takes no time. Equal arguments give equal outcomes.

    Raises:
        ValueError: if `pricing` omits a `Compute`; if there are more ranks than devices; if the two
            ends of a message differ in size; or if ranks wait for each other forever (the message
            lists these ranks).
        ImportError: if simpy is not installed. The extra "plan" installs it.
    """
    programs = as_sequence("programs", programs, "Program, one for each rank")
    cluster = as_cluster(cluster)
    if not programs or not all(isinstance(x, Program) for x in programs):
        raise ValueError(f"programs must be one Program for each rank, got {shown(programs)}")
    if len({x.ordered for x in programs}) > 1:
        raise ValueError("programs must all be recorded with the same ordered, got True and False")
    return play_with_stand_ins(dict(enumerate(programs)), range(len(programs)), cluster, pricing)


def play_with_stand_ins(
    programs: Mapping[int, Program],
    stand_ins: Sequence[int],
    cluster: Cluster,
    pricing: Pricing | None = None,
) -> Outcome:
    """Return the times at which all ranks compute, send and wait, from the programs of some of the
    ranks.

    A program is the list of one rank's computations, messages and waits. `stand_ins[rank]` is the
    rank whose program is used for `rank`. If `rank` has a program, `stand_ins[rank]` must be
    `rank`. If some ranks have no program, all programs must have been recorded with `ordered`, and
    must post the same exchanges in the same order (`exchange_alike`).
    """
    calls = computes(programs.values())
    seconds = price(cluster.device, calls) if pricing is None else _checked(pricing, calls)
    hardware = Hardware(cluster, len(stand_ins))

    def run(messages: bool, attention: bool) -> dict[int, list[Event]]:
        return _Run(programs, stand_ins, hardware, seconds, messages, attention).events

    return Outcome(programs, stand_ins, run(True, True), run)


def _checked(pricing: Pricing, calls: list[Compute]) -> Mapping[int, float]:
    seconds = pricing(calls)
    for compute in calls:
        if not 0 <= seconds.get(id(compute), -1.0) < math.inf:
            call = f"{compute.what!r}, step {compute.step}"
            got = seconds.get(id(compute))
            raise ValueError(f"pricing must give each compute its seconds, got {got} for {call}")
    return seconds


def require_simpy() -> ModuleType:
    """Return the simpy package, or raise an ImportError with the command that installs it."""
    try:
        import simpy
    except ImportError as error:
        raise ImportError("simulations need simpy: pip install 'seqpar[plan]'") from error
    return simpy


class _Run:
    """One simulation of all programs. `events` contains, for each rank, the rank's actions in the
    order in which they end.
    """

    def __init__(
        self,
        programs: Mapping[int, Program],
        stand_ins: Sequence[int],
        hardware: Hardware,
        seconds: Mapping[int, float],
        messages: bool,
        attention: bool,
    ) -> None:
        self._env = require_simpy().Environment()  # starts at time 0
        self._hardware = hardware
        self._seconds = seconds
        self._messages = messages
        self._attention = attention
        ordered = all(x.ordered for x in programs.values())
        self._network = Network(self._env, hardware, ordered, stand_ins)
        self.events: dict[int, list[Event]] = {rank: [] for rank in programs}
        # The exchange for which each rank is waiting or has waited last.
        self._waits: dict[int, Flight] = {}
        ranks = {
            rank: self._env.process(self._rank(rank, program, {}))
            for rank, program in programs.items()
        }
        self._env.run()
        stuck = {rank: self._waits[rank].post for rank, x in ranks.items() if x.is_alive}
        if stuck:
            reasons = [f"rank {rank} for {x.what!r}, step {x.step}" for rank, x in stuck.items()]
            raise ValueError(
                f"programs must not wait for each other forever: {'; '.join(reasons[:8])}"
            )

    def _rank(
        self, rank: int, program: Program, flights: dict[int, Flight]
    ) -> Generator[simpy.Event, None, None]:
        env, events = self._env, self.events[rank]
        concurrent: dict[int, simpy.Process] = {}  # by the id of the program
        for action in program.actions:
            start = env.now
            if isinstance(action, Compute):
                yield from self._compute(rank, action)
                what, step, area = action.what, action.step, action.area
                events.append(Event("compute", what, step, start, env.now, rank, area=area))
            elif isinstance(action, Copy):
                seconds, through = self._hardware.copying(rank, action.nbytes)
                yield from self._take(seconds, through)
                copied = action.nbytes
                events.append(Event("flight", action.what, 0, start, env.now, rank, bytes=copied))
            elif isinstance(action, Begin):
                process = env.process(self._rank(rank, action.program, flights))
                concurrent[id(action.program)] = process
            elif isinstance(action, End):
                yield concurrent[id(action.program)]
            elif isinstance(action, Serve):
                yield from self._serve(rank, action.programs, flights)
            elif not self._messages:
                continue
            elif isinstance(action, Post):
                flights[action.number] = self._network.post(rank, action)
            else:
                assert isinstance(action, Wait)
                self._waits[rank] = flight = flights.pop(action.number)
                yield flight.done
                self._waited(rank, flight, start)

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
        """Use the resources `through` for `seconds`, or longer if other computations or messages
        use the same resources.
        """
        ended = self._env.event()
        self._network.shares.start(seconds, through, ended.succeed)
        yield ended

    def _serve(
        self, rank: int, programs: dict[int, Program], flights: dict[int, Flight]
    ) -> Generator[simpy.Event, None, None]:
        if not self._messages:
            for program in programs.values():
                yield from self._rank(rank, program, flights)
            return
        arrivals = require_simpy().Store(self._env)
        pending = {number: flights.pop(number) for number in programs}
        for number, flight in pending.items():
            if flight.done.callbacks is None:  # the exchange has already ended
                arrivals.put(number)
            else:
                flight.done.callbacks.append(partial(_put, arrivals, number))
        while pending:
            start = self._env.now
            self._waits[rank] = next(iter(pending.values()))
            arrival = arrivals.get()
            yield arrival
            number = arrival.value
            self._waited(rank, pending.pop(number), start)
            yield from self._rank(rank, programs[number], flights)

    def _waited(self, rank: int, flight: Flight, start: float) -> None:
        post, stop = flight.post, self._env.now
        receivers = tuple(sorted({peer for peer, _ in post.sends}))
        senders = tuple(sorted({peer for peer, _ in post.recvs}))
        sent = sum(nbytes for _, nbytes in post.sends)
        self.events[rank] += [
            Event("flight", post.what, post.step, flight.posted, stop, rank, receivers, sent),
            Event("wait", post.what, post.step, start, stop, rank, senders or receivers),
        ]


def _put(store: simpy.Store, number: int, _: simpy.Event) -> None:
    store.put(number)

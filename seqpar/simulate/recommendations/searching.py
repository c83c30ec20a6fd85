"""The search for the fastest way to train, in the order of lower bounds."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count

import numpy as np

from seqpar.comm.waiting import Progress
from seqpar.costs.costs import Costs
from seqpar.layout.layout import Layout
from seqpar.simulate.recommendations.divisions import Division
from seqpar.simulate.recommendations.predicting import predicted, too_large
from seqpar.simulate.recommendations.recommendation import NOT_SIMULATED, Recommendation
from seqpar.simulate.recommendations.ways import ways_of
from seqpar.simulate.steps.training_step import least_step_seconds, least_trainer_seconds

# If no way fits, the way that lacks the least memory is simulated to find its longest batch. With
# more tokens than this, it is not, because the simulation's tables need up to 65 bytes per token.
MAX_TOKENS_FOR_LONGEST = 2**22
_log = logging.getLogger("seqpar")


class Search:
    """The search for the fastest way to train.

    A *way* is one configuration for training (`Recommendation`). Each division of the devices has
    many ways. The search keeps a queue of divisions and ways, each with a lower bound on its time,
    and always continues with the smallest bound:

    * If the smallest bound belongs to a division, the division is replaced by its ways with a few
      strategies.
    * If the smallest bound belongs to a way whose bound was computed by a quick method, a larger
      bound is computed by a slower method.
    * If the smallest bound belongs to a way whose larger bound is known already, the way is
      simulated.

    When all bounds are above the time of the fastest step, the search adds the remaining strategies
    for the division of the fastest way. The search ends if these strategies were already added.

    A way whose parameters and activations cannot fit is not simulated. If no way fits, the way with
    the least missing memory is simulated, unless it has too many tokens.

    Attributes:
        ways: all ways so far.
        simulated: the ways with predictions, by their indices in `ways`.
        too_large: the ways that cannot fit, by their indices in `ways`.
    """

    def __init__(self, costs: Costs, simulate_all: bool, close: float) -> None:
        self.ways: list[Recommendation] = []
        self.simulated: dict[int, Recommendation] = {}
        self.too_large: dict[int, Recommendation] = {}
        self.interrupted = False
        self._costs, self._simulate_all, self._close = costs, simulate_all, close
        self._bounds: list[float] = []
        self._tighter: list[Iterator[float]] = []
        self._queue: list[tuple[float, int, int | Division]] = []  # a heap of bounds
        self._order = count()
        self._best: Recommendation | None = None
        self._completed: set[int] = set()  # ids of divisions whose ways were all added

    def run(self, ways: Iterable[Recommendation], divided: Iterable[Division]) -> None:
        """Search until the fastest configuration is known.

        If the user interrupts the search, it ends as soon as a simulated configuration fits into
        memory. Raises a KeyboardInterrupt if the user interrupts again before that.
        """
        with stop_on_interrupt("recommend") as interrupted:
            self._add(ways)
            for division in divided:
                self._put(0.0 if self._simulate_all else division.least_seconds, division)
            progress = Progress(f"recommend looks for the best of {len(self._queue)} ways to train")
            try:
                while (following := self._next()) is not None:
                    if interrupted() and self._fastest < np.inf:
                        raise KeyboardInterrupt
                    # After an interrupt, the first way that fits is enough.
                    self._take(*following, tighten=not interrupted())
                    if self.simulated:
                        progress.doing = self._progress()
                    progress.tick()
                if not self.simulated and self.too_large:
                    least = min(self.too_large, key=lambda number: self.too_large[number].memory)
                    if self.ways[least].layout.tokens <= MAX_TOKENS_FOR_LONGEST:
                        self.simulated[least] = predicted(self.ways[least], self._costs)
            except KeyboardInterrupt:
                if self._fastest == np.inf:
                    raise
                self.interrupted = True

    def results(self) -> list[Recommendation]:
        """Return all configurations, each with predictions or with the reason why it was not
        simulated.
        """
        return [
            self.simulated.get(number)
            or self.too_large.get(number)
            or (
                replace(way, why_not=NOT_SIMULATED)
                if self.interrupted
                else replace(way, excluded=True, seconds=self._bounds[number])
            )
            for number, way in enumerate(self.ways)
        ]

    @property
    def _fastest(self) -> float:
        return np.inf if self._best is None else self._best.seconds

    def _add(self, ways: Iterable[Recommendation], bound: float = 0.0) -> None:
        for way in ways:
            number = len(self.ways)
            self.ways.append(way)
            self._bounds.append(bound)
            bounds = iter(()) if self._simulate_all else lower_bounds(way, self._costs)
            self._tighter.append(bounds)
            unfit = None if self._simulate_all else too_large(way, self._costs)
            if unfit is None:
                self._put(bound, number)
            else:
                self.too_large[number] = unfit

    def _put(self, bound: float, item: int | Division) -> None:
        heappush(self._queue, (bound, next(self._order), item))

    def _next(self) -> tuple[float, int | Division] | None:
        if not self._queue or self._queue[0][0] > self._fastest * self._close:
            division = None if self._best is None else self._best.division
            if division is None or id(division) in self._completed:
                return None
            self._completed.add(id(division))
            self._add(ways_of(division, self._costs, others=True), division.least_seconds)
            return self._next()
        bound, _, item = heappop(self._queue)
        return bound, item

    def _take(self, bound: float, item: int | Division, tighten: bool) -> None:
        if isinstance(item, Division):
            self._add(ways_of(item, self._costs), bound)
            return
        tighter = next(self._tighter[item], None) if tighten else None
        if tighter is not None:
            self._bounds[item] = max(bound, tighter)
            self._put(self._bounds[item], item)
            return
        self.simulated[item] = found = predicted(self.ways[item], self._costs)
        if found.seconds < self._fastest:
            self._best = found

    def _progress(self) -> str:
        done = f"recommend has simulated {len(self.simulated)} of {len(self.ways)} ways to train"
        return done if self._best is None else f"{done}, fastest {self._best.name!r}"


def lower_bounds(way: Recommendation, costs: Costs) -> Iterator[float]:
    """Yield two lower bounds on the seconds of a training step with one configuration.

    A program is the list of one rank's computations, messages and waits. The first bound is
    computed from the program of the rank that probably computes longest. The second bound is
    computed from the programs of a few ranks that probably compute long, and computing it takes
    more time. A bound is 0 if the strategy refuses the layout.
    """
    if way.servers:
        yield least_trainer_seconds(way.layout, costs)
        return
    division = way.division
    try:
        busy = _busy_ranks(way.layout)
        for ranks in dict.fromkeys((busy[:1], busy)):
            if division is None:
                yield least_step_seconds(way.strategy, way.layout, costs, ranks, **way.options)
            else:
                context = division.divided.context
                micro_batch = least_step_seconds(
                    way.strategy, way.layout, context, ranks, **way.options
                )
                yield division.least_seconds_with(micro_batch)
    except ValueError:  # the simulation of the way reports the reason
        yield 0.0


def _busy_ranks(layout: Layout) -> tuple[int, ...]:
    """Return the ranks that probably compute longest.

    The result contains the rank whose queries have the most (query, key) pairs, the rank whose keys
    have the most pairs, the first rank and the last rank.
    """
    lengths = np.diff(layout.cu_seqlens)
    pairs_of_queries, pairs_of_keys = np.zeros(layout.ranks), np.zeros(layout.ranks)
    for rank in range(layout.ranks):
        documents, starts, stops = layout.geometry.holdings[rank].columns
        pairs = (stops * stops - starts * starts) / 2  # approximate number of causal pairs
        pairs_of_queries[rank] = pairs.sum()
        pairs_of_keys[rank] = ((stops - starts) * lengths[documents] - pairs).sum()
    most = int(pairs_of_queries.argmax()), int(pairs_of_keys.argmax())
    return tuple(dict.fromkeys((*most, 0, layout.ranks - 1)))


@contextmanager
def stop_on_interrupt(work: str) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after the user has interrupted `work`.

    The first Ctrl-C only logs a line and makes the function return True. A second Ctrl-C raises a
    KeyboardInterrupt. Outside the main thread, or if the program handles SIGINT itself, interrupts
    are not handled and the function returns False.
    """
    interrupted = False

    def note(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _log.warning("%s stops after the current step; Ctrl-C again stops it immediately", work)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)

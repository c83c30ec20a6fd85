"""The transport "tree", which combines maps by recursive doubling.

A *span* is a range of consecutive tokens of a document on one rank. The *map* of a span is the
function from the state before the span to the state after the span. The algorithm is the parallel
prefix by recursive doubling of Hillis and Steele, "Data parallel algorithms" (1986), in the
exclusive form of MPI_Exscan. Martin and Cundy, "Parallelizing Linear Recurrent Neural Nets Over
Sequence Length" (2018), section 2, use a parallel prefix for affine recurrences.

The *window* of span i is a range of spans that ends with span i, together with the combined map of
these spans. At the start, the window has only span i. In step d, the rank of span i sends the
window of 2ᵈ spans to the rank of span i + 2ᵈ. After step d, the window of span i + 2ᵈ has twice as
many spans as before. A window is *complete* if it begins with the first span of the document. A
complete window is only a state. A document of n spans takes ⌈log₂ n⌉ exchanges. Each rank needs
memory for two windows for each of its spans, on any number of ranks.

A work-efficient tree would send two maps per rank instead of log₂ n maps. However, it would need
twice as many exchanges.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.comm.messages.comm import Comm
from seqpar.core.arguments import Ints
from seqpar.core.traffic import Traffic
from seqpar.linear.chains import Chain
from seqpar.linear.maps.map_strategy import MapCall, MapStrategy
from seqpar.linear.maps.maps import Maps, apply, compose, pack, unpack
from seqpar.linear.scanning import Index, as_table, index_of, start


class Arrivals(NamedTuple):
    """The windows that arrive at a rank in one step.

    A *span* is a range of a document's tokens on one rank, and a *window* is the combined map of
    consecutive spans. A window is *complete* if it begins at the start of the document. A step has
    one object for complete windows, and a second object for all other windows.
    """

    stations: Tensor  # (arrivals,): the slots of the spans at which they arrive
    # (rank, slice): the windows that come from each rank, ascending, including this rank.
    parts: list[tuple[int, slice]]
    onward: Index  # the arrivals at spans that send their window in a later step
    maps: Tensor  # (onward,): the slots of the maps of these spans


class Step(NamedTuple):
    number: int  # d, the number of the step
    # (rank, complete, others): the slots of the maps whose windows are sent to each rank, including
    # this rank.
    sends: list[tuple[int, Index, Index]]
    # The complete windows that arrive, and the other windows.
    complete: Arrivals
    others: Arrivals
    travels: bool  # whether anything is sent to or received from another rank


def sent_windows(chain: Chain, rank: int) -> Iterator[tuple[int, Ints]]:
    """Yield the number of each step, and the spans of `rank` from which maps are sent in the step.

    A *span* is a range of a document's tokens on one rank. Spans are returned as ascending indices
    in `chain`, the list of the spans of all documents.
    """
    mine = np.flatnonzero(chain.holder == rank)
    for step in range(int(chain.number.max(initial=0)).bit_length()):
        yield step, mine[chain.behind[mine] >= 1 << step]


def _steps(chain: Chain, rank: int) -> Iterator[Step]:
    mine = np.flatnonzero(chain.holder == rank)
    for number, sent in sent_windows(chain, rank):
        apart = 1 << number
        reached = mine[chain.number[mine] >= apart]
        if not (sent.size or reached.size):
            continue
        targets = chain.holder[sent + apart]
        sends = []
        for peer in np.unique(targets).tolist():
            spans = sent[targets == peer]
            early = chain.number[spans] < apart
            complete, others = (index_of(chain.maps[spans[x]]) for x in (early, ~early))
            sends.append((peer, complete, others))
        early = chain.number[reached] < 2 * apart
        whole, partial = (_arrivals(chain, reached[x], apart) for x in (early, ~early))
        peers = {peer for peer, *_ in [*sends, *whole.parts, *partial.parts]}
        yield Step(number, sends, whole, partial, bool(peers - {rank}))


def _arrivals(chain: Chain, reached: Ints, apart: int) -> Arrivals:
    """Return which windows arrive at the spans `reached`, and from which ranks they arrive.

    A *span* is a range of a document's tokens on one rank. A *window* is the combined map of
    consecutive spans. The window that arrives at a span was sent by the rank of the span that is
    `apart` spans earlier in the document.
    """
    sources = chain.holder[reached - apart]
    order = np.argsort(sources, kind="stable")
    reached, sources = reached[order], sources[order]
    ranks, first = np.unique(sources, return_index=True)
    stops = [*first[1:].tolist(), sources.size]
    parts = list(zip(ranks.tolist(), map(slice, first.tolist(), stops), strict=False))
    onward = np.flatnonzero(chain.behind[reached] >= 2 * apart)
    return Arrivals(
        stations=as_table(chain.stations[reached]),
        parts=parts,
        onward=index_of(onward),
        maps=as_table(chain.maps[reached[onward]]),
    )


@dataclass(frozen=True)
class Tree(MapStrategy):
    routable = False  # ranks skip steps in which they send and receive nothing
    transport = "tree"

    def exchange(self, comm: Comm, call: MapCall, device: torch.device, backward: bool) -> _Doubled:
        return _Doubled(comm.channel("tree"), call, device, backward)

    def exchange_traffic(self, call: MapCall, rank: int) -> list[Traffic]:
        rows = []
        for direction in ("forward", "backward"):
            chain = Chain.of(call.routes, direction == "backward")
            for step, spans in sent_windows(chain, rank):
                complete = chain.number[spans] < 1 << step
                sizes = np.where(complete, call.state_bytes, call.map_bytes)
                peers = chain.holder[spans + (1 << step)]
                for some in (complete, ~complete):
                    totals = np.bincount(peers[some], sizes[some], call.routes.ranks)
                    rows += [
                        Traffic(direction, step, peer, 1, int(totals[peer]))
                        for peer in np.flatnonzero(totals).tolist()
                        if peer != rank
                    ]
        return rows


class _Doubled:
    """The exchange that combines maps. `wait` returns the states that enter the spans of this rank.

    A thread combines maps while the rank computes. On a GPU, the thread uses a separate stream.
    """

    def __init__(self, comm: Comm, call: MapCall, device: torch.device, backward: bool) -> None:
        rank, routes = comm.rank, call.routes
        self._comm, self._call = comm, call
        self._label = f"recurrent {'backward' if backward else 'forward'}"
        self._steps = call.once_on(
            device,
            ("doubling", backward),
            lambda: list(_steps(Chain.of(routes, backward), rank)),
        )
        spans = routes.held(rank).states
        self._stations = spans.states_out if backward else spans.states_in
        self.travels = any(step.travels for step in self._steps)

    def post(self, maps: Maps) -> None:
        # For each station, the window that ends before the span of the station. Only the state of a
        # complete window is used.
        transition, state = maps
        self._before = Maps(
            transition.new_empty((self._stations, *transition.shape[1:])),
            state.new_empty((self._stations, *state.shape[1:])),
        )
        self._maps = maps
        self._join = start(self.travels, self._run, *maps, *self._before)

    def wait(self) -> Tensor:
        self._join()
        return self._before.state

    def _run(self) -> None:
        if not self._steps:
            return
        maps, call = self._maps, self._call
        # The states that leave spans. A state is valid when the span's window is complete.
        left = maps.state.clone()
        packed = maps.state.new_empty((len(left), *call.packed_shape))
        pack(maps, packed)
        for step in self._steps:
            states, others = self._exchange(step, left, packed)
            self._complete(step, states, left)
            self._widen(step, unpack(call.options.kind, others, call.shape.dim), packed)

    def _exchange(self, step: Step, left: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Send and receive the windows of a step.

        Return the states of the complete windows that arrive, and the packed maps of the incomplete
        windows that arrive.
        """
        arriving, recvs = [], []
        for x, arrivals in ((left, step.complete), (packed, step.others)):
            room = x.new_empty((len(arrivals.stations), *x.shape[1:]))
            arriving.append(room)
            recvs += [(peer, room[part]) for peer, part in arrivals.parts]
        sends = [(peer, left[slots]) for peer, slots, _ in step.sends]
        sends += [(peer, packed[slots]) for peer, _, slots in step.sends]
        own = self._comm.rank
        kept = [x for peer, x in sends if peer == own and x.numel()]
        places = [x for peer, x in recvs if peer == own and x.numel()]
        for x, place in zip(kept, places, strict=True):
            place.copy_(x)
        self._comm.exchange(
            [x for x in sends if x[0] != own],
            [x for x in recvs if x[0] != own],
            label=self._label,
            step=step.number,
        ).wait()
        return arriving[0], arriving[1]

    def _complete(self, step: Step, states: Tensor, left: Tensor) -> None:
        """Compute the states that enter spans from the complete windows that have arrived.

        A *span* is a range of a document's tokens on one rank. A *window* is the combined map of
        consecutive spans, and is complete if it begins at the start of the document. For each span
        that sends its window in a later step, the state that leaves the span is also computed, and
        is written to `left`.
        """
        arrivals, kind, maps = step.complete, self._call.options.kind, self._maps
        if not len(arrivals.stations):
            return
        if step.number:
            before = _select(self._before, arrivals.stations)
            states = apply(kind, before.transition, states) + before.state
        self._before.state.index_copy_(0, arrivals.stations, states)
        if len(arrivals.maps):
            own = _select(maps, arrivals.maps)
            passed = apply(kind, own.transition, states[arrivals.onward]) + own.state
            left.index_copy_(0, arrivals.maps, passed)

    def _widen(self, step: Step, windows: Maps, packed: Tensor) -> None:
        """Extend the window of each span by the incomplete window that has arrived for the span.

        A *span* is a range of a document's tokens on one rank. A *window* is the combined map of
        consecutive spans, and is incomplete if it does not begin at the start of the document. For
        each span that sends its window in a later step, the extended window is written to `packed`.
        """
        arrivals, kind = step.others, self._call.options.kind
        if not len(arrivals.stations):
            return
        if step.number:
            windows = compose(kind, _select(self._before, arrivals.stations), windows)
        for to, what in zip(self._before, windows, strict=True):
            to.index_copy_(0, arrivals.stations, what)
        if len(arrivals.maps):
            onward = Maps(*(x[arrivals.onward] for x in windows))
            wider = compose(kind, _select(self._maps, arrivals.maps), onward)
            part = packed.new_empty((len(arrivals.maps), *packed.shape[1:]))
            pack(wider, part)
            packed.index_copy_(0, arrivals.maps, part)


def _select(maps: Maps, slots: Tensor) -> Maps:
    return Maps(*(x.index_select(0, slots) for x in maps))

"""Recursive doubling along chains: which maps a rank sends, and which it composes, in each step.

Span number i of a document has a *window* that ends with it: at first its own map, and in step d
the composition of the 2ᵈ spans up to it. It sends the window to span i + 2ᵈ, whose window then has
twice as many. A window that reaches back to the head (`chain.py`) is a state alone: it is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.core.arguments import Ints
from seqpar.linear.indices import Index, index_of
from seqpar.recurrent.chain import Chain


class Arrivals(NamedTuple):
    """Windows that arrive at a rank in a step, of one kind: complete, or not.

    Attributes:
        stations: (arrivals,) the slots of the spans that they arrive at.
        parts: (rank, slice) of those that come from each rank, ascending, itself included.
        onward: those which widen a window that is sent in a later step.
        maps: (onward,) the slots of these spans' maps.
    """

    stations: Tensor
    parts: list[tuple[int, slice]]
    onward: Index
    maps: Tensor

    @property
    def spans(self) -> int:
        """How many arrive."""
        return self.stations.shape[0]

    @property
    def continues(self) -> bool:
        """Whether any are sent on."""
        return bool(self.maps.shape[0])


class Step(NamedTuple):
    """One step of a rank.

    Attributes:
        number: d, of the step.
        sends: (rank, complete, others) slots of maps whose windows each rank gets, itself included.
        complete, others: what arrives.
        travels: whether anything is sent to another rank, or comes from one.
    """

    number: int
    sends: list[tuple[int, Index, Index]]
    complete: Arrivals
    others: Arrivals
    travels: bool


class Doubling:
    """One rank's steps in one pass, with their tables on a device.

    Attributes:
        steps: those in which the rank does anything.
        travels: whether anything is sent or received.
    """

    def __init__(self, chain: Chain, rank: int, device: torch.device) -> None:
        self.steps = list(_steps(chain, rank, device))
        self.travels = any(step.travels for step in self.steps)


def sent_windows(chain: Chain, rank: int) -> Iterator[tuple[int, Ints]]:
    """Yield each step's number with the spans of the rank whose windows are sent in it.

    The spans are indices in the chain, ascending; those before the 2ᵈ-th are complete.
    """
    mine = np.flatnonzero(chain.holder == rank)
    for step in range(int(chain.number.max(initial=0)).bit_length()):
        yield step, mine[chain.behind[mine] >= 1 << step]


def _steps(chain: Chain, rank: int, device: torch.device) -> Iterator[Step]:
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
            complete, others = (index_of(chain.maps[spans[x]], device) for x in (early, ~early))
            sends.append((peer, complete, others))
        early = chain.number[reached] < 2 * apart
        whole, partial = (_arrivals(chain, reached[x], apart, device) for x in (early, ~early))
        peers = {peer for peer, *_ in [*sends, *whole.parts, *partial.parts]}
        yield Step(number, sends, whole, partial, bool(peers - {rank}))


def _arrivals(chain: Chain, reached: Ints, apart: int, device: torch.device) -> Arrivals:
    """Return what arrives at spans, from those so far before them."""
    sources = chain.holder[reached - apart]
    order = np.argsort(sources, kind="stable")
    reached, sources = reached[order], sources[order]
    ranks, first = np.unique(sources, return_index=True)
    stops = [*first[1:].tolist(), sources.size]
    parts = [
        (peer, slice(start, stop))
        for peer, start, stop in zip(ranks.tolist(), first.tolist(), stops, strict=False)
    ]
    onward = np.flatnonzero(chain.behind[reached] >= 2 * apart)
    return Arrivals(
        stations=torch.from_numpy(np.ascontiguousarray(chain.stations[reached])).to(device),
        parts=parts,
        onward=index_of(onward, device),
        maps=torch.from_numpy(np.ascontiguousarray(chain.maps[reached[onward]])).to(device),
    )

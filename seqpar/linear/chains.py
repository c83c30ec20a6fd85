"""Plan the messages that send states from each part of a document to the next part.

A *state* is a matrix for each head, which summarises tokens of a document. To get the state of two
consecutive parts of a document, the state of the first part is decayed over the rows of the second
part, and the state of the second part is added. This file uses these words:

* A *span* is a range of consecutive tokens of a document on one rank.
* The *chain* of a document is the list of its spans in order, with the rank of each span. Without
  causality, a chain consists of *runs* instead of spans. A run is all tokens of a document on one
  rank.
* A *link* is a state that is sent from one span of a chain to the next span.
* The *depth* of a link says when the link is sent. In a causal forward, the depth is the index of
  the sending span in the chain. In every pass, the depth of a link is larger than the depths of all
  earlier links of the chain.
* A *hop* is one message. It contains all links of the same depth that one rank sends to another
  rank, or to itself.
* The *slot* of a state is its index in the first dimension of a tensor of states.
* A *station* is a position of a document at which a rank needs the sum of the states of all earlier
  tokens, such as the start of a span (`routes.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from seqpar.core.arguments import Ints
from seqpar.core.ranges import count_up
from seqpar.linear.routes import StateRoutes


class Hop(NamedTuple):
    """One message of states, which one rank sends to another rank or keeps for itself.

    A *span* is a range of consecutive tokens of a document on one rank. Each state in the message
    is sent from a span of a document to the next span. It is λ^rows · (the sum of the states before
    the span, `carries_from`) + (the state of the span, `own_states`). States without such a sum
    come last.

    One message contains states of all documents. All ranks send and receive messages in the order
    of `depth`, so that no two ranks wait for each other.
    """

    depth: int
    source: int  # the rank that sends
    target: int  # the rank that receives
    own_states: Ints  # (links,): the slot of the state that the source rank adds, or −1
    carries_from: Ints  # (links,): the slot of the source's station whose sum is passed on, or −1
    rows: Ints  # (links,): over how many rows this sum decays
    # (links,): the slot of the target's station. Higher slots are sums between runs.
    target_slots: Ints


def hops_of(routes: StateRoutes, rank: int, backward: bool, ends: bool = True) -> list[Hop]:
    """Return the messages of states that a rank sends or receives, in the order in which they are
    sent.

    Messages are sorted by depth, then by the sending rank, and then by the receiving rank. The
    sender and the receiver of a message have its states in the same order. With `ends=False`, the
    messages contain no states that are sent from or to the end of a document.
    """

    def build() -> list[Hop]:
        if routes.causal:
            links = _causal_links(routes, rank, backward, ends)
        else:
            links = _round_trip_links(routes, rank, backward)
        table = np.concatenate([*links], axis=1)
        depth, source, target, document, _, carries_from = table[:6]
        table = table[:, np.lexsort((document, carries_from < 0, target, source, depth))]
        apart = np.flatnonzero((np.diff(table[:3]) != 0).any(0)) + 1
        parts = np.split(table, apart, axis=1) if table.size else []
        return [Hop(*part[:3, 0].tolist(), *part[4:]) for part in parts]

    return routes.derived(("hops", rank, backward, ends), build)


class Chain(NamedTuple):
    """The chains of all documents in one pass. Each field is an array with one entry for each span.

    A *span* is a range of consecutive tokens of a document on one rank. The chain of a document is
    the list of its spans, along which states are sent. A pass is a forward or a backward. In
    forward, documents are in ascending order, and the spans of a document are in the order of their
    tokens. In backward, all entries are in the reverse order.

    Without causality, a span is all tokens of a document on one rank. In forward, the spans of a
    document are in the order of their ranks, except that the span with the document's last token is
    last.
    """

    holder: Ints  # the rank that holds the span
    number: Ints  # how many spans of the document come before this span in the pass
    behind: Ints  # how many spans of the document come after this span in the pass
    maps: Ints  # the slot of the map or state that the span sends, or −1
    stations: Ints  # the slot of the state that enters the span in the pass, or −1
    documents: Ints
    rows: Ints

    @classmethod
    def of(cls, routes: StateRoutes, backward: bool) -> Chain:
        held = [routes.held(rank) for rank in range(routes.ranks)]
        holder = np.repeat(np.arange(len(held)), [x.documents.size for x in held])
        columns = [
            [x.documents, x.starts, x.stops, x.ends, x.states.state_in, x.states.state_out]
            for x in held
        ]
        document, start, stop, ends, state_in, state_out = np.concatenate(columns, axis=1)
        order = np.lexsort((holder, ends, start, document))
        count = np.unique(document, return_counts=True)[1]
        number = count_up(count)
        behind = np.repeat(count, count) - 1 - number
        unordered = state_out, state_in, document, stop - start, holder
        state_out, state_in, document, rows, holder = (x[order] for x in unordered)
        if not backward:
            return cls(holder, number, behind, state_out, state_in, document, rows)
        reverse = holder, behind, number, state_in, state_out, document, rows
        return cls._make(x[::-1] for x in reverse)

    @property
    def heads(self) -> Ints:
        """For each entry, the index of the first entry of the same document."""
        return np.arange(self.number.size) - self.number

    def of_rank(self, rank: int) -> tuple[Ints, Ints]:
        """Return two arrays of spans, as indices in the chain.

        A *span* is a range of consecutive tokens of a document on one rank. The first array has the
        spans whose state `rank` sends to the next span, or receives. The second array has the spans
        on `rank` that are the last spans of their documents in this forward or backward.
        """
        here, last = self.holder == rank, self.behind == 0
        to_here = np.r_[here[1:], False]
        return np.flatnonzero((here | to_here) & ~last), np.flatnonzero(here & last)

    def links(
        self,
        source: Ints,
        target: Ints,
        slots: Ints,
        depth: Ints,
        states: Ints | int,
        carries: Ints,
        rows: Ints | int,
    ) -> Ints:
        """Return links, which are states that are sent from one span to another, as an array (8,
        links).

        The rows of the array are the depth, the sending rank, the receiving rank, the document, and
        the four fields of `Hop` from `own_states` to `target_slots`. A span is a range of
        consecutive tokens of a document on one rank. Link i leads from the span source[i] to the
        span target[i], and slots[i] is the index of its state in a tensor on the receiving rank.
        `depth`, `states`, `carries` and `rows` have a value for each span of the chain, which
        applies to the link that begins at the span.
        """
        columns = np.broadcast_arrays(depth, self.holder, self.documents, states, carries, rows)
        depth, holder, document, *others = np.stack(columns)[:, source]
        return np.stack([depth, holder, self.holder[target], document, *others, slots])


def _causal_links(routes: StateRoutes, rank: int, backward: bool, ends: bool) -> Iterator[Ints]:
    chain = Chain.of(routes, backward)
    current, last = chain.of_rank(rank)
    carries = np.where((chain.number > 0) | (backward and ends), chain.stations, -1)
    columns = chain.number + backward, chain.maps, carries, chain.rows
    yield chain.links(current, current + 1, chain.stations[current + 1], *columns)
    if ends and backward:
        first = np.flatnonzero(chain.number == 0)
        yield from _links_from_ends(routes, chain, rank, first, 0, chain.stations)
    elif ends:
        yield _links_to_ends(routes, chain, rank, last, *columns)


def _round_trip_links(routes: StateRoutes, rank: int, backward: bool) -> Iterator[Ints]:
    """Yield the states that a rank sends or receives in a call without causality.

    Along the ranks of a document, each rank adds its state to the sum of the earlier ranks and
    sends the sum to the next rank. The last rank gets the sum over the document, which is sent back
    from rank to rank. No state decays.
    """
    runs = Chain.of(routes, backward=False)
    current, last = runs.of_rank(rank)
    following = current + 1
    state = runs.stations  # the state of a run and its station have the same slot
    stations = [routes.stations(rank, backward).slots.size for rank in range(routes.ranks)]
    # The slots of sums between runs follow those of stations.
    passed_on = state + np.array(stations)[runs.holder]
    carries = np.where(runs.number > 0, passed_on, -1)
    yield runs.links(current, following, passed_on[following], runs.number, state, carries, 0)
    from_end = (runs.number > 0) | (backward and routes.returns_final_state)
    carries = np.where(from_end, passed_on, -1)
    yield runs.links(last, last, state[last], runs.number, state, carries, 0)
    back = runs.number + 2 * runs.behind + 2
    yield runs.links(following, current, state[current], back, -1, state, 0)
    if backward:
        ends = np.flatnonzero(runs.behind == 0)
        yield from _links_from_ends(routes, runs, rank, ends, -1, passed_on)
    else:
        yield _links_to_ends(routes, runs, rank, last, runs.number + 1, -1, state, 0)


def _links_to_ends(routes: StateRoutes, chain: Chain, rank: int, last: Ints, *columns: Any) -> Ints:
    """Return the links with which forward passes states from the spans `last` to the ends of their
    documents.

    If the call returns no final states, there are no such links.
    """
    ended = last[: last.size * routes.returns_final_state]
    slots = routes.held(rank).states.states_in + np.arange(ended.size)
    return chain.links(ended, ended, slots, *columns)


def _links_from_ends(
    routes: StateRoutes, chain: Chain, rank: int, last: Ints, depth: int, slots: Ints
) -> Iterator[Ints]:
    """Yield the gradients of final states that `rank` sends or receives in backward.

    Every rank has a gradient of the final state of every document, and sends it to the rank of the
    document's span in `last`. A span is a range of consecutive tokens of a document on one rank.
    `slots` (spans,) has, for each span, the index of the received sum in a tensor of states.
    """
    for source in range(routes.ranks) if routes.returns_final_state else ():
        reached = last if source == rank else last[chain.holder[last] == rank]
        documents = chain.documents[reached]
        states = routes.held(source).states.states_in + documents
        columns = depth, source, chain.holder[reached], documents, states, -1, 0, slots[reached]
        yield np.stack(np.broadcast_arrays(*columns))

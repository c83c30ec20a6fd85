"""Rows of this rank visit others of its row, which compute with them, and their results return.

Legend: B batch, T local rows, Hq query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

from torch import Tensor

from seqpar.comm.messages.exchange import Arriving, Comm
from seqpar.comm.messages.header import Message
from seqpar.layout.masks.blocks import Blocks
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.wire.packing import Packing, RowFormat
from seqpar.softmax.wire.row_messages import Rows

# Heads travel in groups, one for so many rows of the longest rank. So blocks stop growing with the
# rows, and a group still keeps a GPU busy for longer than the host takes to post the next.
_ROWS = 4096


class QueryHop(NamedTuple):
    """Some of this rank's query rows visit `host`, and some of `guest` visit this rank.

    Attributes:
        step: in which, from 1.
        host, guest: ranks.
        away, here: the rows that visit the host, and those of the guest that visit this rank.
        blocks: the slices of the latter over each block of keys that is here; None if there are
            none.
    """

    step: int
    host: int
    guest: int
    away: Rows
    here: Rows
    blocks: Blocks | None


class Visit(NamedTuple):
    """What is sent and received of a meeting, of one group of heads.

    Attributes:
        step, host, guest: as in `QueryHop`.
        group: of which heads, the number of a group.
        rows: those that visit the host; None if there are none.
        blocks: as in `QueryHop`.
        visitors, guests: messages with what visits the host, and with what visits this rank.
        packed: whether the two are sent as such; else each of their tensors is a message.
        leaving, returning: messages with the guest's results, and with this rank's.
    """

    step: int
    host: int
    guest: int
    group: int
    rows: Rows | None
    blocks: Blocks | None
    visitors: Packing
    guests: Packing
    packed: tuple[bool, bool]
    leaving: Packing
    returning: Packing


class Heads(NamedTuple):
    """A group of heads: KV heads, and the query heads that share them."""

    queries: slice
    keys: slice


class QuerySchedule(NamedTuple):
    """A pass of visits.

    Attributes:
        groups: in which heads travel; the same on all ranks.
        visits: in order.
    """

    groups: list[Heads]
    visits: list[Visit]

    @classmethod
    def of(
        cls,
        call: ResolvedCall,
        meetings: Sequence[QueryHop],
        travelling: Sequence[RowFormat],
        results: Sequence[RowFormat],
    ) -> QuerySchedule:
        """Return the pass in which these tensors travel and return."""
        groups, visits = head_groups(call), []
        for step, host, guest, away, here, blocks in meetings:
            for group, heads in enumerate(groups):
                count = heads.queries.stop - heads.queries.start
                sizes = [(call.shape.batch, x.count, count) for x in (away, here)]
                visit = Visit(
                    step,
                    host,
                    guest,
                    group,
                    away if away.count else None,
                    blocks,
                    visitors=Packing(sizes[0], travelling),
                    guests=Packing(sizes[1], travelling),
                    packed=(are_packed(call, away), are_packed(call, here)),
                    leaving=Packing(sizes[1], results),
                    returning=Packing(sizes[0], results),
                )
                visits.append(visit)
        return cls(groups, visits)


def head_groups(call: ResolvedCall) -> list[Heads]:
    """Return the groups in which heads travel: the same on all ranks."""
    rows = max(holding.tokens for holding in call.layout.holdings) * call.shape.batch
    heads, kv_heads = call.shape.heads, call.shape.kv_heads
    groups = max(1, min(kv_heads, rows // _ROWS))
    edges = pairwise(i * kv_heads // groups for i in range(groups + 1))
    shared = heads // max(kv_heads, 1)  # some ranks of a mesh have none
    return [Heads(slice(a * shared, b * shared), slice(a, b)) for a, b in edges]


def are_packed(call: ResolvedCall, rows: Rows) -> bool:
    """Return whether all tensors of rows that travel are packed into one message.

    They are not if their rows are one range, of all heads, and the batch is 1: then they are sent
    without a copy.
    """
    in_place = rows.is_range and call.shape.batch == 1
    return not in_place or len(head_groups(call)) > 1


class Pass:
    """The visits of a plan, while they are made.

    Results return in exchanges of their own, through a channel of their own: in one exchange with
    the queries of the next visit they would leave a step later.
    """

    def __init__(
        self, comm: Comm, plan: QuerySchedule, travelling: Sequence[Tensor], label: str
    ) -> None:
        """Prepare a pass in which the tensors `travelling`, (B, T, Hq, …), travel."""
        self._queries, self._results = comm, comm.channel("results")
        self._plan, self._label, self._device = plan, label, travelling[0].device
        whole = [x.contiguous() for x in travelling]
        self._travelling = [[x[:, :, heads.queries] for x in whole] for heads in plan.groups]

    def results(
        self,
        compute_first: Callable[[], None],
        compute_last: Callable[[], None],
        compute: Callable[[Visit, list[Tensor]], Tensor],
    ) -> Iterator[tuple[int, slice | Tensor, list[Tensor]]]:
        """Yield the results of visits, as they return, in order.

        With them come the number of their group of heads, and where their rows are among the local
        ones: a range, or indices.

        `compute_first` computes with this rank's own queries while the first guests arrive, and
        `compute_last` while the last results return. `compute` returns a message with the results
        of guests. While it computes those of a visit, the guests of the next are under way and, in
        the other direction, the results of the visit before.
        """
        visits = self._plan.visits
        arriving = self._post_queries(visits[0]) if visits else None
        compute_first()
        returning: tuple[Visit, Arriving] | None = None
        for visit, following in zip_longest(visits, visits[1:]):
            assert arriving is not None
            guests = arriving.wait()
            arriving = self._post_queries(following) if following else None
            message = compute(visit, guests) if visit.blocks else None
            del guests  # before the next ones are computed
            returned = self._returned(*returning) if returning else None
            returning = visit, self._post_results(visit, message)
            del message
            if returned:
                yield returned
            del returned
        compute_last()
        if returning and (returned := self._returned(*returning)):
            yield returned

    def _returned(
        self, visit: Visit, results: Arriving
    ) -> tuple[int, slice | Tensor, list[Tensor]] | None:
        """Wait for the results of a visit; None if it has no rows."""
        tensors = results.wait()
        return (visit.group, visit.rows.local(self._device), tensors) if visit.rows else None

    def _post_queries(self, visit: Visit) -> Arriving:
        sends_one, receives_one = visit.packed
        sends, recvs, guests = list[Message](), list[Message](), list[Tensor]()
        if visit.blocks and receives_one:
            message, guests = visit.guests.empty(self._device)
            recvs = [(visit.guest, message)]
        elif visit.blocks:
            guests = visit.guests.apart(self._device)
            recvs = [(visit.guest, x) for x in guests]
        if visit.rows:
            travelling = self._travelling[visit.group]
            if sends_one:
                packed, tensors = visit.visitors.empty(self._device)
                for x, out in zip(travelling, tensors, strict=True):
                    visit.rows.select(x, out)
                sends = [(visit.host, packed)]
            else:
                sends = [(visit.host, visit.rows.select(x)) for x in travelling]
        pending = self._queries.exchange(sends, recvs, label=self._label, step=visit.step)
        return Arriving(guests, pending)

    def _post_results(self, visit: Visit, message: Tensor | None) -> Arriving:
        sends = [] if message is None else [(visit.guest, message)]
        recvs, results = list[Message](), list[Tensor]()
        if visit.rows:
            arriving, results = visit.returning.empty(self._device)
            recvs = [(visit.host, arriving)]
        pending = self._results.exchange(sends, recvs, label=self._label, step=visit.step)
        return Arriving(results, pending)

"""Send query rows to the other ranks of a row, which compute with them, and get results back.

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

# Heads travel in groups: one group for each 4,096 rows of the rank with the most rows. Blocks then
# stop growing with the rows, and the work on a group still keeps a GPU busy for longer than the
# host needs to post the next group. At 8,192 rows, blocks take 53 KiB per token instead of 81 in
# forward, and 73 instead of 105 in backward. Groups of rows would need their own tables, and their
# own gradients of keys.
_ROWS_PER_GROUP = 4096


class QueryHop(NamedTuple):
    """In one step, queries of this rank go to a receiver, and queries of a sender come here.

    Attributes:
        step: the step's number, from 1.
        receiver, sender: ranks.
        sent, received: the query rows that go to the receiver, and the sender's rows that come.
        blocks: the slices of the received rows over each block of keys that is here, or None if no
            rows are received.
    """

    step: int
    receiver: int
    sender: int
    sent: Rows
    received: Rows
    blocks: Blocks | None


class GroupHop(NamedTuple):
    """The messages of a hop for one group of heads.

    Attributes:
        step, receiver, sender, blocks: as in `QueryHop`.
        group: the number of the group of heads.
        rows: the rows that go to the receiver, or None if there are none.
        outgoing, incoming: the messages with queries to the receiver, and from the sender.
        packed: whether outgoing and incoming tensors are packed into one message each; otherwise
            each tensor is its own message.
        leaving, returning: the messages with the sender's results, and with this rank's results.
    """

    step: int
    receiver: int
    sender: int
    group: int
    rows: Rows | None
    blocks: Blocks | None
    outgoing: Packing
    incoming: Packing
    packed: tuple[bool, bool]
    leaving: Packing
    returning: Packing


class HeadSlices(NamedTuple):
    """A group of heads: query heads, and the KV heads that they share."""

    queries: slice
    keys: slice


class QuerySchedule(NamedTuple):
    """The hops of one pass, in order.

    Attributes:
        groups: the groups in which heads travel; the same on all ranks.
        hops: each hop of each group.
    """

    groups: list[HeadSlices]
    hops: list[GroupHop]

    @classmethod
    def of(
        cls,
        call: ResolvedCall,
        query_hops: Sequence[QueryHop],
        travelling: Sequence[RowFormat],
        results: Sequence[RowFormat],
    ) -> QuerySchedule:
        """Return the schedule of a pass in which tensors of these formats travel and return."""
        groups, hops = head_groups(call), []
        for step, receiver, sender, sent, received, blocks in query_hops:
            packed = are_packed(call, sent), are_packed(call, received)
            for number, heads in enumerate(groups):
                count = heads.queries.stop - heads.queries.start
                sent_sizes = call.shape.batch, sent.count, count
                received_sizes = call.shape.batch, received.count, count
                hop = GroupHop(
                    step,
                    receiver,
                    sender,
                    number,
                    sent if sent.count else None,
                    blocks,
                    outgoing=Packing(sent_sizes, travelling),
                    incoming=Packing(received_sizes, travelling),
                    packed=packed,
                    leaving=Packing(received_sizes, results),
                    returning=Packing(sent_sizes, results),
                )
                hops.append(hop)
        return cls(groups, hops)


def head_groups(call: ResolvedCall) -> list[HeadSlices]:
    """Return the groups in which heads travel: the same on all ranks."""
    rows = max(holding.tokens for holding in call.layout.holdings) * call.shape.batch
    heads, kv_heads = call.shape.heads, call.shape.kv_heads
    groups = max(1, min(kv_heads, rows // _ROWS_PER_GROUP))
    edges = pairwise(i * kv_heads // groups for i in range(groups + 1))
    shared = heads // max(kv_heads, 1)  # inside USP a rank may have no heads
    return [HeadSlices(slice(a * shared, b * shared), slice(a, b)) for a, b in edges]


def are_packed(call: ResolvedCall, rows: Rows) -> bool:
    """Return whether all tensors of rows that travel are packed into one message.

    They are not packed if the rows are one range with all heads and the batch is 1: the tensors are
    then sent without a copy.
    """
    in_place = rows.is_range and call.shape.batch == 1
    return not in_place or len(head_groups(call)) > 1


class QueryExchange:
    """Carries out the hops of a schedule.

    Results travel in separate exchanges on a separate channel. In one exchange with the queries of
    the next hop they would leave a step later.
    """

    def __init__(
        self, comm: Comm, schedule: QuerySchedule, travelling: Sequence[Tensor], label: str
    ) -> None:
        """Prepare a pass in which the tensors `travelling`, (B, T, Hq, …), travel."""
        self._queries, self._results = comm, comm.channel("results")
        self._schedule, self._label, self._device = schedule, label, travelling[0].device
        whole = [x.contiguous() for x in travelling]
        self._travelling = [[x[:, :, heads.queries] for x in whole] for heads in schedule.groups]

    def results(
        self,
        compute_first: Callable[[], None],
        compute_last: Callable[[], None],
        compute: Callable[[GroupHop, list[Tensor]], Tensor],
    ) -> Iterator[tuple[int, slice | Tensor, list[Tensor]]]:
        """Yield the results of this rank's queries in the order of the hops, as they return.

        Each comes with the number of its group of heads and with its local rows, as a range or
        indices.

        Args:
            compute_first: computes with this rank's own queries while the first queries arrive.
            compute_last: does so while the last results return.
            compute: returns a message with the results of received queries. Meanwhile the queries
                of the next hop and, in the other direction, the results of the hop before are
                under way.
        """
        hops = self._schedule.hops
        arriving = self._post_queries(hops[0]) if hops else None
        compute_first()
        returning: tuple[GroupHop, Arriving] | None = None
        for hop, following in zip_longest(hops, hops[1:]):
            assert arriving is not None
            received = arriving.wait()
            arriving = self._post_queries(following) if following else None
            message = compute(hop, received) if hop.blocks else None
            del received  # before the next queries are computed
            returned = self._returned(*returning) if returning else None
            returning = hop, self._post_results(hop, message)
            del message
            if returned:
                yield returned
            del returned
        compute_last()
        if returning and (returned := self._returned(*returning)):
            yield returned

    def _returned(
        self, hop: GroupHop, results: Arriving
    ) -> tuple[int, slice | Tensor, list[Tensor]] | None:
        """Wait for the results of a hop; return None if it has no rows."""
        tensors = results.wait()
        return (hop.group, hop.rows.local(self._device), tensors) if hop.rows else None

    def _post_queries(self, hop: GroupHop) -> Arriving:
        sends_packed, receives_packed = hop.packed
        sends, recvs, received = list[Message](), list[Message](), list[Tensor]()
        if hop.blocks and receives_packed:
            message, received = hop.incoming.empty(self._device)
            recvs = [(hop.sender, message)]
        elif hop.blocks:
            received = hop.incoming.apart(self._device)
            recvs = [(hop.sender, x) for x in received]
        if hop.rows:
            travelling = self._travelling[hop.group]
            if sends_packed:
                packed, tensors = hop.outgoing.empty(self._device)
                for x, out in zip(travelling, tensors, strict=True):
                    hop.rows.select(x, out)
                sends = [(hop.receiver, packed)]
            else:
                sends = [(hop.receiver, hop.rows.select(x)) for x in travelling]
        pending = self._queries.exchange(sends, recvs, label=self._label, step=hop.step)
        return Arriving(received, pending)

    def _post_results(self, hop: GroupHop, message: Tensor | None) -> Arriving:
        sends = [] if message is None else [(hop.sender, message)]
        recvs, results = list[Message](), list[Tensor]()
        if hop.rows:
            arriving, results = hop.returning.empty(self._device)
            recvs = [(hop.receiver, arriving)]
        pending = self._results.exchange(sends, recvs, label=self._label, step=hop.step)
        return Arriving(results, pending)

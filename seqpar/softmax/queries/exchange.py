"""Send query rows to the other ranks of a row, which compute with them, and get results back.

Legend: B batch, T local rows, Hq query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple

from torch import Tensor

from seqpar.comm.messages.exchange import Arriving, Comm
from seqpar.comm.messages.header import Message
from seqpar.core.arguments import Ints
from seqpar.layout.masks.mask import Blocks, Slices
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.keys.plan import HeadSlices, head_groups
from seqpar.softmax.wire.row_messages import Packing, RowFormat, Rows


class QueryHop:
    """In one step, queries of this rank go to a receiver, and queries of a sender come here.

    Attributes:
        step: the step's number, from 1.
        receiver, sender: ranks.
        sent_count, received_count: how many query rows go to the receiver and come from the sender.
    """

    def __init__(
        self,
        step: int,
        receiver: int,
        sender: int,
        counts: tuple[int, int],
        rows: tuple[Callable[[], Ints], Callable[[], Ints]],
        slices: Sequence[Callable[[], Slices]],
    ) -> None:
        """Keep functions that return the ranges of rows, and slices over each block of keys.

        `counts` and `rows` each describe the sent rows first, then the received rows.
        """
        self.step, self.receiver, self.sender = step, receiver, sender
        self.sent_count, self.received_count = counts
        self._rows, self._slices = rows, slices

    @cached_property
    def sent(self) -> Rows:
        return Rows(self._rows[0]())

    @cached_property
    def received(self) -> Rows:
        return Rows(self._rows[1]())

    @cached_property
    def blocks(self) -> Blocks | None:
        """The slices of received rows over each block of keys that is here, or None."""
        return Blocks([build() for build in self._slices]) if self.received_count else None


class GroupHop:
    """The messages of a hop for one group of heads.

    Attributes:
        step, receiver, sender: as in `QueryHop`.
        number: its number among the groups of all hops; the same on the two ranks of a message.
        group: the number of the group of heads.
        sends, receives: whether rows go to the receiver, and come from the sender.
        outgoing, incoming: the messages with queries to the receiver, and from the sender.
        leaving, returning: the messages with the sender's results, and with this rank's results.
    """

    def __init__(
        self,
        hop: QueryHop,
        number: int,
        group: int,
        sizes: tuple[int, int],
        formats: tuple[Sequence[RowFormat], Sequence[RowFormat]],
        packs: bool,
    ) -> None:
        """Describe the messages of tensors of these formats: those that travel, and their results.

        `sizes` are the batch and the number of heads. Messages are packed if `packs`.
        """
        self._hop, self._packs = hop, packs
        self.step, self.receiver, self.sender = hop.step, hop.receiver, hop.sender
        self.number, self.group = number, group
        self.sends, self.receives = bool(hop.sent_count), bool(hop.received_count)
        (batch, heads), (travelling, results) = sizes, formats
        sent, received = (batch, hop.sent_count, heads), (batch, hop.received_count, heads)
        self.outgoing, self.incoming = Packing(sent, travelling), Packing(received, travelling)
        self.leaving, self.returning = Packing(received, results), Packing(sent, results)

    @property
    def rows(self) -> Rows:
        """The rows that go to the receiver."""
        return self._hop.sent

    @property
    def blocks(self) -> Blocks | None:
        return self._hop.blocks

    @property
    def sends_packed(self) -> bool:
        """Whether the tensors that are sent are packed into one message, or one message each."""
        return self._packs or not self._hop.sent.is_range

    @property
    def receives_packed(self) -> bool:
        """Whether the tensors that are received are packed into one message."""
        return self._packs or not self._hop.received.is_range


class QuerySchedule(NamedTuple):
    """The hops of one pass, in order."""

    groups: list[HeadSlices]  # the groups in which heads travel; the same on all ranks
    hops: list[GroupHop]  # each hop of each group
    ends_early: bool  # whether hops without rows were left out at the end

    @classmethod
    def of(
        cls,
        call: ResolvedCall,
        query_hops: Sequence[QueryHop],
        last_step: int,
        travelling: Sequence[RowFormat],
        results: Sequence[RowFormat],
    ) -> QuerySchedule:
        """Return the schedule of a pass in which tensors of these formats travel and return.

        `last_step` is the number of the last hop, which may have been left out.
        """
        groups, packs, hops = query_groups(call), packs_all_rows(call), list[GroupHop]()
        for hop in query_hops:
            for group, heads in enumerate(groups):
                sizes = call.shape.batch, heads.queries.stop - heads.queries.start
                number = hop.step * len(groups) + group
                hops.append(GroupHop(hop, number, group, sizes, (travelling, results), packs))
        return cls(groups, hops, bool(hops) and hops[-1].step < last_step)


def query_groups(call: ResolvedCall) -> list[HeadSlices]:
    """Return the groups in which heads travel: the same on all ranks."""
    return head_groups(call.shape, call.layout)


def packs_all_rows(call: ResolvedCall) -> bool:
    """Return whether all tensors that travel are packed into one message, whatever their rows are.

    Otherwise tensors whose rows are one range are sent one by one, without a copy.
    """
    return call.shape.batch > 1 or len(query_groups(call)) > 1


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
            received, arriving = arriving.wait(), None
            # Where ranks leave out hops without rows, all post the others in one order.
            if adjacent := following and following.number == hop.number + 1:
                arriving = self._post_queries(following)
            message = compute(hop, received) if hop.receives else None
            del received  # before the next queries are computed
            returned = self._returned(*returning) if returning else None
            returning = hop, self._post_results(hop, message)
            del message
            if following and not adjacent:
                arriving = self._post_queries(following)
            if returned:
                yield returned
            del returned
        if returning and self._schedule.ends_early:
            # Sums have the same bits whether hops without rows are left out or not.
            if returned := self._returned(*returning):
                yield returned
            returning = None
        compute_last()
        if returning and (returned := self._returned(*returning)):
            yield returned

    def _returned(
        self, hop: GroupHop, results: Arriving
    ) -> tuple[int, slice | Tensor, list[Tensor]] | None:
        """Wait for the results of a hop; return None if it has no rows."""
        tensors = results.wait()
        return (hop.group, hop.rows.local(self._device), tensors) if hop.sends else None

    def _post_queries(self, hop: GroupHop) -> Arriving:
        sends, recvs, received = list[Message](), list[Message](), list[Tensor]()
        if hop.receives and hop.receives_packed:
            message, received = hop.incoming.empty(self._device)
            recvs = [(hop.sender, message)]
        elif hop.receives:
            received = hop.incoming.apart(self._device)
            recvs = [(hop.sender, x) for x in received]
        if hop.sends:
            travelling = self._travelling[hop.group]
            if hop.sends_packed:
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
        if hop.sends:
            arriving, results = hop.returning.empty(self._device)
            recvs = [(hop.receiver, arriving)]
        pending = self._results.exchange(sends, recvs, label=self._label, step=hop.step)
        return Arriving(results, pending)

"""Send queries to the other ranks of a mesh row, and receive the results that these ranks compute.

The ranks form a mesh. In a *hop*, this rank sends its queries to one rank of its mesh row, the
*receiver*, and receives the queries of another rank, the *sender*. The results of a hop are sent in
the opposite direction.

Letters of shapes: B is the batch, T the number of local rows, and Hq the number of query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple

from torch import Tensor

from seqpar.comm.messages.comm import Arriving, Comm
from seqpar.comm.messages.message_header import Message
from seqpar.core.arguments import Ints
from seqpar.layout.masks.mask import Blocks, Slices
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.keys.key_plan import HeadSlices, head_groups
from seqpar.softmax.result_dtypes import ResultDtypes, is_one_call
from seqpar.softmax.wire.message_buffers import MessageBuffers
from seqpar.softmax.wire.row_messages import Packing, RowFormat, Rows


@dataclass(eq=False)
class QueryHop:
    """A step in which this rank sends queries to a receiver and receives queries from a sender."""

    step: int  # the number of the step, from 1
    receiver: int
    sender: int
    sent_count: int  # how many query rows are sent to the receiver
    received_count: int  # how many query rows come from the sender
    # Returns this rank's rows that are sent to the receiver. Hops with equal rows return the same
    # object.
    build_sent: Callable[[], Rows]
    build_received: Callable[[], Ints]  # returns the ranges of the sender's rows that arrive
    # For each block of keys, returns the slices of the arriving queries over the block.
    build_slices: Sequence[Callable[[], Slices]]
    # Whether a single kernel call computes the results of the hop, if this is known without slices
    # (`Tiles.known_calls`); otherwise None.
    known_calls: bool | None
    # Returns the slices of this rank's queries over the receiver's keys.
    build_returning: Callable[[], Slices]

    @cached_property
    def sent(self) -> Rows:
        return self.build_sent()

    @cached_property
    def received(self) -> Rows:
        return Rows(self.build_received())

    @cached_property
    def blocks(self) -> Blocks | None:
        """The slices of the received queries over each block of keys, or None without received
        queries.
        """
        return Blocks([build() for build in self.build_slices]) if self.received_count else None

    def leave_of_one_call(self, backward: bool) -> bool:
        """Return whether a single kernel call computes the results that this rank sends."""
        if self.known_calls is not None:
            return self.known_calls
        return self.blocks is not None and is_one_call(self.blocks.slices[0], backward)

    def return_of_one_call(self, backward: bool) -> bool:
        """Return whether a single kernel call computes the results that this rank receives."""
        if self.known_calls is not None:
            return self.known_calls
        return self.sent_count > 0 and is_one_call(self.build_returning(), backward)


class Travelling(NamedTuple):
    """The formats of the tensors that ranks send in a forward or backward.

    Attributes:
        queries: the formats of the tensors that are sent to the receiver.
        result: the format of a result that several kernel calls compute.
        others: the formats of the tensors, such as lse, that are sent back with each result.
        dtypes: the dtypes in which results are sent.
        backward: True for a backward, False for a forward.
    """

    queries: tuple[RowFormat, ...]
    result: RowFormat
    others: tuple[RowFormat, ...]
    dtypes: ResultDtypes
    backward: bool

    def results(self, is_one_call: Callable[[bool], bool]) -> list[RowFormat]:
        """Return the formats of the tensors that are sent back to the rank of the queries.

        `is_one_call(backward)` returns whether a single kernel call computes the result.
        """
        dtype = self.dtypes.of(lambda: is_one_call(self.backward))
        return [self.result._replace(dtype=dtype), *self.others]


class HopMessages(NamedTuple):
    hop: QueryHop
    # The index among the hops of all groups. The sender and the receiver of a message use the same
    # index.
    number: int
    group: int  # the index of the group of heads
    # Whether all tensors share one message, even if they could be sent without a copy.
    packs: bool
    outgoing: Packing  # this rank's queries, to the receiver
    incoming: Packing  # the sender's queries, to this rank
    leaving: Packing  # results of the sender's queries, to the sender
    returning: Packing  # results of this rank's queries, from the receiver

    def packs_rows(self, rows: Rows) -> bool:
        """Return whether all tensors with these rows are sent as one message.

        If not, each tensor is sent as a separate message.
        """
        return self.packs or not rows.is_range


class QuerySchedule(NamedTuple):
    groups: list[HeadSlices]  # the groups in which heads are sent, which are the same on all ranks
    hops: list[HopMessages]  # the hops of the first group, then those of the next group, and so on
    ends_early: bool  # whether the last hops were left out because they have no rows

    @classmethod
    def of(
        cls,
        call: ResolvedCall,
        query_hops: Sequence[QueryHop],
        last_step: int,
        hop_count: int,
        travelling: Travelling,
    ) -> QuerySchedule:
        """Return the schedule of this rank's messages.

        In a *hop*, this rank sends queries to one rank and receives queries from one rank. All hops
        of one group of heads come before the hops of the next group.

        Args:
            call: the call of attention.
            query_hops: the hops of this rank, without the hops in which it exchanges no rows.
            last_step: the number of the last hop, even if this rank exchanges no rows in this hop.
            hop_count: the number of hops of each group, including hops without rows.
            travelling: the formats of the tensors that ranks send.
        """
        groups, packs, hops = query_groups(call), packs_all_rows(call), list[HopMessages]()
        formats = [
            [travelling.results(x) for x in (hop.leave_of_one_call, hop.return_of_one_call)]
            for hop in query_hops
        ]
        for group, heads in enumerate(groups):
            batch, count = call.shape.batch, heads.queries.stop - heads.queries.start
            for hop, (leaving, returning) in zip(query_hops, formats, strict=True):
                sent, received = (batch, hop.sent_count, count), (batch, hop.received_count, count)
                messages = HopMessages(
                    hop,
                    group * hop_count + hop.step,
                    group,
                    packs,
                    outgoing=Packing(sent, travelling.queries),
                    incoming=Packing(received, travelling.queries),
                    leaving=Packing(received, leaving),
                    returning=Packing(sent, returning),
                )
                hops.append(messages)
        return cls(groups, hops, bool(hops) and hops[-1].hop.step < last_step)


def query_groups(call: ResolvedCall) -> list[HeadSlices]:
    return head_groups(call.shape, call.layout, call.mask)


def packs_all_rows(call: ResolvedCall) -> bool:
    """Return whether all tensors that are sent to a rank always share one message.

    If not, tensors are sent one by one if their rows are a single range, because this needs no
    copy.
    """
    return call.shape.batch > 1 or len(query_groups(call)) > 1


# The largest number of results that are stored at the same time. Each needs a buffer.
_MOST_KEPT = 4


class _KeptResults:
    """Decides how many results of a group of heads are stored before they are merged.

    Attributes:
        most: the largest number of results that are stored at the same time, at least 1.
        last: the indices of the hops (`QueryHop`) after which all stored results are merged,
            because later results need the memory of the stored results.
    """

    def __init__(self, returning: Sequence[HopMessages], kept_bytes: int) -> None:
        by_group: dict[int, list[HopMessages]] = {}
        for x in returning:
            by_group.setdefault(x.group, []).append(x)
        # At least 1, because messages of a rank without heads have no bytes.
        largest = max([1, *(x.returning.nbytes for x in returning)])
        longest = max(map(len, by_group.values()), default=1)
        self.most = most = max(1, min(longest, kept_bytes // largest, _MOST_KEPT))
        self.last = {
            x.number for group in by_group.values() for x in (*group[most - 1 :: most], group[-1])
        }
        if most > 1:  # if `most` is 1, results that this rank sends use the same memory
            self.last.remove(returning[-1].number)


class _Packed(NamedTuple):
    """A message with this rank's queries.

    It is sent again in the next step if the rows and heads are the same.
    """

    rows: Rows
    group: int  # the index of the group of heads
    message: Tensor

    def has_rows_of(self, messages: HopMessages) -> bool:
        return self.rows is messages.hop.sent and self.group == messages.group


class QueryExchange:
    """Sends queries to the ranks of a mesh row, and sends the results back.

    Queries and results are sent in separate exchanges, so that results are sent as early as
    possible.
    """

    def __init__(
        self,
        comm: Comm,
        schedule: QuerySchedule,
        travelling: Sequence[Tensor],
        label: str,
        kept_bytes: int = 0,
    ) -> None:
        """Prepare to send the tensors `travelling`, each (B, T, Hq, …).

        `kept_bytes` limits the memory of the results that the caller stores before it merges them.
        """
        self._queries, self._results = comm, comm.channel("results")
        self._schedule, self._label, self._device = schedule, label, travelling[0].device
        # The number of buffers that are needed at a time. The queries of one hop are read while
        # those of the next hop arrive. The results of a hop, in both directions, are in use until
        # the results of the next hop have been computed and posted. By then, the results that this
        # rank sent have left. Buffers grow, because early hops may have fewer rows than late hops,
        # and because more memory is used for other things during early hops.
        leaving = [x.leaving for x in schedule.hops if x.hop.received_count]
        returning = [x for x in schedule.hops if x.hop.sent_count]
        sizes = [x.incoming.elements for x in schedule.hops if x.hop.received_count]
        self._query_memory = MessageBuffers(2, sizes, grow=True)
        self._kept = _KeptResults(returning, kept_bytes)
        to_leave, to_return = (
            [x.elements for x in each] for each in (leaving, [x.returning for x in returning])
        )
        if self._kept.most == 1:
            memory = MessageBuffers(3, [*to_leave, *to_return], grow=True)
            self._leaving_memory = self._returning_memory = memory
        else:
            self._leaving_memory = MessageBuffers(2, to_leave, grow=True)
            self._returning_memory = MessageBuffers(self._kept.most + 1, to_return, grow=True)
        whole = [x.contiguous() for x in travelling]
        self._travelling = [[x[:, :, heads.queries] for x in whole] for heads in schedule.groups]
        self._packed: _Packed | None = None

    @property
    def keeps_results(self) -> bool:
        """Whether the caller stores several results before it merges them."""
        return self._kept.most > 1

    def results(
        self,
        compute_first: Callable[[], None],
        compute_last: Callable[[], None],
        compute: Callable[[HopMessages, list[Tensor], list[Tensor]], None],
    ) -> Iterator[tuple[int, Rows, list[Tensor], bool]]:
        """Exchange all queries and results. Yield the results of this rank's queries when they
        arrive.

        Args:
            compute_first: computes attention of this rank's queries while the first queries of
                other ranks arrive.
            compute_last: computes attention of this rank's queries while the last results arrive.
            compute: computes attention of the queries that arrived in a step. The arguments are the
                messages of the step, the queries, and the tensors to which `compute` writes the
                results.

        Yields:
            The index of the group of heads, the local rows of the result, the tensors of the
            result, and whether the caller must now merge all results that it stores. If the last
            value is True, the memory of the stored results may be overwritten when the next result
            is requested.
        """
        hops = self._schedule.hops
        arriving = self._post_queries(hops[0]) if hops else None
        compute_first()
        returning: tuple[HopMessages, Arriving] | None = None
        for messages, following in zip_longest(hops, hops[1:]):
            assert arriving is not None
            received, arriving = arriving.wait(), None
            # The next hop is posted now if it directly follows this hop. Otherwise hops between the
            # two were left out, and the next hop is posted after the results, so that all ranks
            # post in the same order.
            if adjacent := following and following.number == messages.number + 1:
                arriving = self._post_queries(following)
            message: Tensor | None = None
            if messages.hop.received_count:
                packing = messages.leaving
                message = self._leaving_memory.take(
                    (packing.elements,), packing.dtype, self._device
                )
                compute(messages, received, packing.tensors(message))
            del received  # freed before the next queries are computed
            returned = self._returned(*returning) if returning else None
            returning = messages, self._post_results(messages, message)
            del message
            if following and not adjacent:
                arriving = self._post_queries(following)
            if returned:
                yield returned
            del returned
        if returning and self._schedule.ends_early:
            # The last hops were left out on this rank. The result is yielded here, before the last
            # local work, so that sums have the same bits as with all hops.
            if returned := self._returned(*returning):
                yield returned
            returning = None
        compute_last()
        if returning and (returned := self._returned(*returning)):
            yield returned

    def _returned(
        self, messages: HopMessages, results: Arriving
    ) -> tuple[int, Rows, list[Tensor], bool] | None:
        """Wait for the results that this rank receives in a step, and return what `results` yields.

        The result is None if this rank sent no queries in the step.
        """
        tensors, hop = results.wait(), messages.hop
        if not hop.sent_count:
            return None
        return messages.group, hop.sent, tensors, messages.number in self._kept.last

    def _post_queries(self, messages: HopMessages) -> Arriving:
        hop = messages.hop
        sends, recvs, received = list[Message](), list[Message](), list[Tensor]()
        if hop.received_count:
            packing = messages.incoming
            message = self._query_memory.take((packing.elements,), packing.dtype, self._device)
            if messages.packs_rows(hop.received):
                received, recvs = packing.tensors(message), [(hop.sender, message)]
            else:
                received = packing.apart(message)
                recvs = [(hop.sender, x) for x in received]
        if self._packed is not None and not self._packed.has_rows_of(messages):
            self._packed = None  # freed before another message is allocated
        if hop.sent_count and messages.packs_rows(hop.sent):
            self._packed = self._packed or self._pack(messages)
            sends = [(hop.receiver, self._packed.message)]
        elif hop.sent_count:
            sends = [(hop.receiver, hop.sent.select(x)) for x in self._travelling[messages.group]]
        if messages is self._schedule.hops[-1]:
            self._packed = None
        pending = self._queries.exchange(sends, recvs, label=self._label, step=hop.step)
        return Arriving(received, pending)

    def _pack(self, messages: HopMessages) -> _Packed:
        rows, group = messages.hop.sent, messages.group
        message, tensors = messages.outgoing.empty(self._device)
        for x, out in zip(self._travelling[group], tensors, strict=True):
            rows.select(x, out)
        return _Packed(rows, group, message)

    def _post_results(self, messages: HopMessages, message: Tensor | None) -> Arriving:
        hop = messages.hop
        sends = [] if message is None else [(hop.sender, message)]
        recvs, results = list[Message](), list[Tensor]()
        if hop.sent_count:
            packing = messages.returning
            arriving = self._returning_memory.take((packing.elements,), packing.dtype, self._device)
            results, recvs = packing.tensors(arriving), [(hop.receiver, arriving)]
        pending = self._results.exchange(sends, recvs, label=self._label, step=hop.step)
        return Arriving(results, pending)

"""Send query rows to the other ranks of a row, which compute with them, and get results back.

Legend: B batch, T local rows, Hq query heads.
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
    """In one step, queries of this rank go to a receiver, and queries of a sender come here."""

    step: int  # the step's number, from 1
    receiver: int
    sender: int
    sent_count: int  # how many query rows go to the receiver
    received_count: int  # how many come from the sender
    build_sent: Callable[[], Ints]  # returns the ranges of rows that go to the receiver
    build_received: Callable[[], Ints]  # returns the sender's ranges of rows that arrive
    build_slices: Sequence[Callable[[], Slices]]  # return slices over each block of keys
    # Returns whether one kernel call returns the results that leave or return in the hop, if it is
    # known without slices, or None.
    known_calls: bool | None
    build_returning: Callable[[], Slices]  # returns slices of this rank's queries over their keys

    @cached_property
    def sent(self) -> Rows:
        return Rows(self.build_sent())

    @cached_property
    def received(self) -> Rows:
        return Rows(self.build_received())

    @cached_property
    def blocks(self) -> Blocks | None:
        """The slices of received rows over each block of keys that is here, or None."""
        return Blocks([build() for build in self.build_slices]) if self.received_count else None

    def leave_of_one_call(self, backward: bool) -> bool:
        """Return whether one kernel call returns the results that leave."""
        if self.known_calls is not None:
            return self.known_calls
        return self.blocks is not None and is_one_call(self.blocks.slices[0], backward)

    def return_of_one_call(self, backward: bool) -> bool:
        """Return whether one kernel call returns the results that return."""
        if self.known_calls is not None:
            return self.known_calls
        return self.sent_count > 0 and is_one_call(self.build_returning(), backward)


class Travelling(NamedTuple):
    """The formats of tensors that travel in a pass, and the dtypes of the results that return.

    Attributes:
        queries: the formats of tensors that travel to other ranks.
        result: the format of results; its dtype is that of results of several kernel calls.
        others: the formats of tensors that return with each result.
        dtypes: the dtypes of results.
        backward: whether the pass is backward.
    """

    queries: tuple[RowFormat, ...]
    result: RowFormat
    others: tuple[RowFormat, ...]
    dtypes: ResultDtypes
    backward: bool

    def results(self, is_one_call: Callable[[bool], bool]) -> list[RowFormat]:
        """Return the formats of results; `is_one_call` gets whether the pass is backward."""
        dtype = self.dtypes.of(lambda: is_one_call(self.backward))
        return [self.result._replace(dtype=dtype), *self.others]


class HopMessages(NamedTuple):
    """The messages of a hop for one group of heads."""

    hop: QueryHop
    number: int  # among the hops of all groups; the same on the two ranks of a message
    group: int  # the number of the group of heads
    packs: bool  # whether tensors whose rows are one range also share one message
    outgoing: Packing  # queries to the receiver
    incoming: Packing  # queries from the sender
    leaving: Packing  # the sender's results
    returning: Packing  # this rank's results

    def packs_rows(self, rows: Rows) -> bool:
        """Return whether the tensors that travel share one message, or have one message each."""
        return self.packs or not rows.is_range


class QuerySchedule(NamedTuple):
    """The hops of one pass, in order."""

    groups: list[HeadSlices]  # the groups in which heads travel; the same on all ranks
    hops: list[HopMessages]  # each hop of each group
    ends_early: bool  # whether hops without rows were left out at the end

    @classmethod
    def of(
        cls,
        call: ResolvedCall,
        query_hops: Sequence[QueryHop],
        last_step: int,
        hop_count: int,
        travelling: Travelling,
    ) -> QuerySchedule:
        """Return the schedule of a pass in which tensors of these formats travel and return.

        All hops of a group of heads come before those of the next group, so that the results of a
        group can wait for one merge. `last_step` is the number of the last hop, and `hop_count` is
        the number of hops of a group. Both count hops that were left out.
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
    """Return the groups in which heads travel: the same on all ranks."""
    return head_groups(call.shape, call.layout, call.mask)


def packs_all_rows(call: ResolvedCall) -> bool:
    """Return whether all tensors that travel are packed into one message, whatever their rows are.

    Otherwise tensors whose rows are one range are sent one by one, without a copy.
    """
    return call.shape.batch > 1 or len(query_groups(call)) > 1


# Each of them needs a buffer of its own.
_MOST_KEPT = 4


class _KeptResults:
    """How many results of a group of heads are kept, and the numbers of the last ones.

    Attributes:
        most: the largest number of results that are kept, at least 1.
        last: the numbers of the messages after which no result is kept.
    """

    def __init__(self, returning: Sequence[HopMessages], kept_bytes: int) -> None:
        by_group: dict[int, list[HopMessages]] = {}
        for x in returning:
            by_group.setdefault(x.group, []).append(x)
        # Messages of a rank without heads have no bytes.
        largest = max([1, *(x.returning.nbytes for x in returning)])
        longest = max(map(len, by_group.values()), default=1)
        self.most = most = max(1, min(longest, kept_bytes // largest, _MOST_KEPT))
        self.last = {
            x.number for group in by_group.values() for x in (*group[most - 1 :: most], group[-1])
        }


class QueryExchange:
    """Carries out the hops of a schedule.

    Results travel in separate exchanges on a separate channel. In one exchange with the queries of
    the next hop they would leave a step later.
    """

    def __init__(
        self,
        comm: Comm,
        schedule: QuerySchedule,
        travelling: Sequence[Tensor],
        label: str,
        kept_bytes: int = 0,
    ) -> None:
        """Prepare a pass in which the tensors `travelling`, (B, T, Hq, …), travel.

        The caller may keep results that have returned, in up to `kept_bytes`.
        """
        self._queries, self._results = comm, comm.channel("results")
        self._schedule, self._label, self._device = schedule, label, travelling[0].device
        # The queries of a hop are read while the queries of the next hop arrive. The results that
        # this rank sends in a hop, and those that return to it, are in use until the results of the
        # next hop have been computed and posted. By then, the results that leave have been sent.
        # Buffers grow, because early hops may have fewer rows than late hops, and hold more memory
        # beside the messages.
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

    @property
    def keeps_results(self) -> bool:
        """Whether results that have returned may be kept while others return."""
        return self._kept.most > 1

    def results(
        self,
        compute_first: Callable[[], None],
        compute_last: Callable[[], None],
        compute: Callable[[HopMessages, list[Tensor], list[Tensor]], None],
    ) -> Iterator[tuple[int, Rows, list[Tensor], bool]]:
        """Yield the results of this rank's queries in the order of the hops, as they return.

        Each comes with the number of its group of heads, with its local rows, and with whether it
        is the last one that is kept: all results so far may be overwritten when the next one is
        requested.

        Args:
            compute_first: computes with this rank's own queries while the first queries arrive.
            compute_last: does so while the last results return.
            compute: writes the results of received queries to the tensors of a message. While it
                runs, the queries of the next hop and, in the other direction, the results of the
                hop before are under way.
        """
        hops = self._schedule.hops
        arriving = self._post_queries(hops[0]) if hops else None
        compute_first()
        returning: tuple[HopMessages, Arriving] | None = None
        for messages, following in zip_longest(hops, hops[1:]):
            assert arriving is not None
            received, arriving = arriving.wait(), None
            # Where ranks leave out hops without rows, all post the others in one order.
            if adjacent := following and following.number == messages.number + 1:
                arriving = self._post_queries(following)
            message: Tensor | None = None
            if messages.hop.received_count:
                packing = messages.leaving
                message = self._leaving_memory.take(packing.elements, packing.dtype, self._device)
                compute(messages, received, packing.tensors(message))
            del received  # before the next queries are computed
            returned = self._returned(*returning) if returning else None
            returning = messages, self._post_results(messages, message)
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
        self, messages: HopMessages, results: Arriving
    ) -> tuple[int, Rows, list[Tensor], bool] | None:
        """Wait for the results of a hop; return None if it has no rows."""
        tensors, hop = results.wait(), messages.hop
        if not hop.sent_count:
            return None
        return messages.group, hop.sent, tensors, messages.number in self._kept.last

    def _post_queries(self, messages: HopMessages) -> Arriving:
        hop = messages.hop
        sends, recvs, received = list[Message](), list[Message](), list[Tensor]()
        if hop.received_count:
            packing = messages.incoming
            message = self._query_memory.take(packing.elements, packing.dtype, self._device)
            if messages.packs_rows(hop.received):
                received, recvs = packing.tensors(message), [(hop.sender, message)]
            else:
                received = packing.apart(message)
                recvs = [(hop.sender, x) for x in received]
        if hop.sent_count:
            travelling = self._travelling[messages.group]
            if messages.packs_rows(hop.sent):
                packed, tensors = messages.outgoing.empty(self._device)
                for x, out in zip(travelling, tensors, strict=True):
                    hop.sent.select(x, out)
                sends = [(hop.receiver, packed)]
            else:
                sends = [(hop.receiver, hop.sent.select(x)) for x in travelling]
        pending = self._queries.exchange(sends, recvs, label=self._label, step=hop.step)
        return Arriving(received, pending)

    def _post_results(self, messages: HopMessages, message: Tensor | None) -> Arriving:
        hop = messages.hop
        sends = [] if message is None else [(hop.sender, message)]
        recvs, results = list[Message](), list[Tensor]()
        if hop.sent_count:
            packing = messages.returning
            arriving = self._returning_memory.take(packing.elements, packing.dtype, self._device)
            results, recvs = packing.tensors(arriving), [(hop.receiver, arriving)]
        pending = self._results.exchange(sends, recvs, label=self._label, step=hop.step)
        return Arriving(results, pending)

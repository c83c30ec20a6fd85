"""Plan which keys and values a rank sends in which step, and to which ranks.

A *key row* is the key and the value of one token. The plan of a rank is made once per layout and
mask. Ranks are counted around a ring. Each step has one or more distances d: rank r sends rows to
rank r + d and receives rows from rank r − d. A strategy chooses the distances of each step. A rank
sends only the rows to which some query of the receiver attends.

On ranks with many rows, heads are sent and computed in groups (see the comment at
`_ROWS_PER_GROUP`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.attention.operands import OperandShape
from seqpar.core.arguments import Ints
from seqpar.core.ranges import UNLIMITED
from seqpar.core.traffic import Traffic
from seqpar.layout.geometry import Geometry
from seqpar.layout.masks.mask import Blocks, Mask, Slices, halves, slices_between, slices_over
from seqpar.layout.masks.reach import AttentionSide
from seqpar.softmax.call import Operands, ResolvedCall
from seqpar.softmax.compute.partial import OutputGradient, PackedGradients, PartialGradients
from seqpar.softmax.result_dtypes import ResultDtypes, hops_are_one_call, is_one_call
from seqpar.softmax.wire.message_dtypes import encoded_width
from seqpar.softmax.wire.row_messages import Rows

Distances = Sequence[Sequence[int]]  # the distances of each step


@dataclass(eq=False)
class KeyStep:
    number: int  # the step's number in errors, traces and traffic
    receivers: list[int]  # the ranks to which this rank sends rows
    sent_counts: list[int]  # how many rows it sends to each of these ranks
    source: list[int]  # the ranks from which this rank receives rows
    counts: list[int]  # how many rows it receives from each rank of `source`
    rows_for: Callable[[int], Rows]
    build_slices: Callable[[], Slices]
    # Whether a single kernel call computes the gradients that this rank sends back, and the
    # gradients that it gets back (`result_dtypes.py`). Both are False if a block has rows of
    # several ranks.
    leave_of_one_call: Callable[[], bool]
    return_of_one_call: Callable[[], bool]

    @cached_property
    def rows(self) -> int:
        return sum(self.counts)

    @cached_property
    def sent_rows(self) -> int:
        return sum(self.sent_counts)

    @cached_property
    def travels(self) -> bool:
        return bool(self.rows or self.sent_rows)

    @cached_property
    def to(self) -> list[tuple[int, Rows]]:
        """The ranks to which this rank sends keys, each with the rows of keys that are sent."""
        return [(peer, self.rows_for(peer)) for peer in self.receivers]

    @cached_property
    def slices(self) -> Slices:
        return self.build_slices()

    def sends_last_rows_of(self, step: KeyStep) -> bool:
        """Return whether the last message of `step` and the first message of this step have the
        same rows.
        """
        return bool(step.receivers and self.receivers) and step.to[-1][1] is self.to[0][1]


class LazySlices(Sequence[Slices]):
    """Lists of slices, which say which of this rank's queries attend to which keys.

    A slice is a range of query rows and a range of key rows with a mask. The first list is over the
    keys that this rank holds. Each further list is over the keys that arrive in one step, and is
    built when it is first read.
    """

    def __init__(self, build_own: Callable[[], Slices], steps: Sequence[KeyStep]) -> None:
        self._build_own, self._steps = build_own, steps

    @cached_property
    def _own(self) -> Slices:
        return self._build_own()

    def __len__(self) -> int:
        return 1 + len(self._steps)

    def __getitem__(self, block: int) -> Slices:  # type: ignore[override]  # never a range of them
        return self._steps[block - 1].slices if block else self._own

    def __iter__(self) -> Iterator[Slices]:
        yield self._own
        for step in self._steps:
            yield step.slices


class KeyPlan:
    """The steps of one rank, in which the rank sends keys, receives keys and computes attention."""

    def __init__(self, call: ResolvedCall, distances: Distances, every_step: bool = False) -> None:
        """Make the plan of the rank `call.rank`.

        `distances` are the distances of each step. Steps in which the rank sends and receives no
        rows are left out, unless `every_step` is True.
        """
        tables = KeyTables(call)
        numbers, senders, receivers = _numbered(call.rank, call.ranks, distances)
        sent, received = key_counts(call, call.rank)
        used = np.full(numbers.size, every_step) | (sent[receivers] > 0) | (received[senders] > 0)
        # The steps in which this rank sends or receives rows. If ranks relay messages for each
        # other, these are all steps, because such ranks count exchanges.
        self.steps = list[KeyStep]()
        used_steps, first = np.unique(numbers[used], return_index=True)
        edges = [*first.tolist(), int(used.sum())]
        to, source = receivers[used].tolist(), senders[used].tolist()
        sent_counts, counts = sent[receivers[used]].tolist(), received[senders[used]].tolist()
        for number, begin, end in zip(used_steps.tolist(), edges, edges[1:], strict=False):
            part = slice(begin, end)
            owners, arriving = with_rows(source[part], counts[part])
            leaving = with_rows(to[part], sent_counts[part])
            build = partial(tables.slices_over, owners or source[begin : begin + 1])
            has_one_owner = len(distances[number - 1]) == 1
            pairs = ([(call.rank, x) for x in owners], [(x, call.rank) for x in leaving[0]])
            calls = [partial(tables.are_one_call, x if has_one_owner else []) for x in pairs]
            step = KeyStep(number, *leaving, owners, arriving, tables.rows_for, build, *calls)
            self.steps.append(step)
        last = self.steps[-1].number if self.steps else 0
        self.ends_early = last < len(distances)  # whether the last steps were left out
        own = partial(tables.slices_over, [call.rank])
        # The slices that forward computes: over this rank's own keys, then over the keys of each
        # step.
        self.blocks = Blocks(LazySlices(own, self.steps))

    @cached_property
    def own(self) -> tuple[Slices, ...]:
        """The slices that backward computes over the keys that this rank holds.

        A slice is a range of query rows and a range of key rows. If this rank sends or receives
        rows, the slices are divided into two halves. Backward computes the first half while the
        first keys arrive, and the second half while the last gradients are sent back.
        """
        own = self.blocks.slices[0]
        return halves(own) if any(step.travels for step in self.steps) else (own,)


class KeyTables:
    """The rows that a rank sends, and which of its queries attend to which keys.

    Both are computed when they are first needed. The object does not keep its layouts alive.
    """

    def __init__(self, call: ResolvedCall) -> None:
        self._queries, self._keys = weakref.ref(call.layout), weakref.ref(call.kv_layout)
        self._mask, self._rank = call.mask, call.rank
        self._known: dict[bytes, Rows] = {}

    @property
    def _geometry(self) -> tuple[Geometry, Geometry]:
        queries, keys = self._queries(), self._keys()
        assert queries is not None and keys is not None
        return queries, keys

    def rows_for(self, peer: int) -> Rows:
        """Return the rows of this rank's keys to which the queries of `peer` attend.

        If two peers need the same rows, both calls return the same object, so that the rows are
        packed only once.
        """
        queries, keys = (x.worst_case for x in self._geometry)
        side = AttentionSide.of_keys(queries, keys, self._mask)
        ranges = side.own_ranges(keys.holdings[self._rank], [queries.holdings[peer]])
        if (rows := self._known.get(ranges.tobytes())) is None:
            rows = self._known[ranges.tobytes()] = Rows(ranges)
        return rows

    def slices_over(self, owners: list[int]) -> Slices:
        queries, keys = self._geometry
        if len(owners) == 1:
            return slices_between(queries, self._rank, keys, owners[0], self._mask)
        return slices_over(queries, self._rank, keys, tuple(owners), self._mask)

    def are_one_call(self, pairs: list[tuple[int, int]]) -> bool:
        """Return whether, for each pair of ranks, one kernel call computes the gradients of the
        keys.

        A pair is (the rank that holds the queries, the rank that holds the keys). The result is
        False if `pairs` is empty.
        """
        queries, keys = self._geometry
        if not pairs or hops_are_one_call(queries, keys, self._mask):
            return bool(pairs)
        slices = (slices_between(queries, x, keys, y, self._mask) for x, y in pairs)
        return all(is_one_call(x, backward=True) for x in slices)


def key_counts(call: ResolvedCall, rank: int) -> tuple[Ints, Ints]:
    """Return how many key rows `rank` sends to each rank, and how many it receives from each rank.

    Both results are arrays (ranks,). The element of `rank` itself is 0.
    """
    queries, keys = call.layout.worst_case, call.kv_layout.worst_case
    sent = AttentionSide.of_keys(queries, keys, call.mask).own_rows(keys.holdings[rank]).counts
    received = AttentionSide.of_queries(queries, keys, call.mask).their_rows(queries.holdings[rank])
    sent[rank] = received[rank] = 0
    return sent, received


def with_rows(ranks: list[int], counts: list[int]) -> tuple[list[int], list[int]]:
    used = [i for i, count in enumerate(counts) if count]
    return [ranks[i] for i in used], [counts[i] for i in used]


def _numbered(rank: int, ranks: int, distances: Distances) -> tuple[Ints, Ints, Ints]:
    """Return three arrays with one element for each distance of each step.

    In a step with the distance d, rank r sends rows to rank r + d and receives rows from rank r −
    d. The arrays have the number of the step, the rank from which `rank` receives rows, and the
    rank to which `rank` sends rows.
    """
    numbers = np.repeat(np.arange(1, len(distances) + 1), [len(step) for step in distances])
    flat = np.fromiter(chain.from_iterable(distances), np.int64, numbers.size)
    return numbers, (rank - flat) % ranks, (rank + flat) % ranks


def key_areas(call: ResolvedCall, rank: int, distances: Distances) -> list[int]:
    """Return the work of a rank over its own keys, and after that its work in each step.

    The unit of work is one (query, key) pair in one query head.
    """
    numbers, senders, _ = _numbered(rank, call.ranks, distances)
    _, received = key_counts(call, rank)
    areas = [0] * (len(distances) + 1)
    areas[0] = call.slices(rank, rank).area
    used = received[senders] > 0
    for number, sender in zip(numbers[used].tolist(), senders[used].tolist(), strict=True):
        areas[number] += call.slices(rank, sender).area
    return [area * call.shape.heads for area in areas]


def key_traffic(
    call: ResolvedCall,
    rank: int,
    distances: Distances,
    message_dtype: torch.dtype | None = None,
    gradient_dtypes: ResultDtypes | None = None,
    groups: int = 1,
) -> list[Traffic]:
    """Return the sizes of the messages with keys and gradients that a rank sends.

    In a step with the distance d, rank r sends keys to rank r + d and receives keys from rank r −
    d.

    Args:
        call: the attention call.
        rank: the rank that sends the messages.
        distances: the distances of each step.
        message_dtype: the dtype of 8-bit messages, or None for the dtype of the keys.
        gradient_dtypes: the dtypes of gradients, or None if no gradients return.
        groups: the number of groups in which heads are sent.
    """
    shape, rows = call.shape, list[Traffic]()
    dims, heads = (shape.dim, shape.value_dim), shape.batch * shape.kv_heads
    size = heads * sum(dims) * shape.dtype.itemsize  # bytes per token
    if message_dtype is not None:
        size = heads * encoded_width(dims)
    numbers, senders, receivers = _numbered(rank, call.ranks, distances)
    sent, received = key_counts(call, rank)

    def messages(peers: Ints, counts: Ints) -> Iterator[tuple[int, int, int]]:
        used = np.flatnonzero(counts[peers])
        columns = numbers[used], peers[used], counts[peers[used]]
        return zip(*(column.tolist() for column in columns), strict=True)

    for number, peer, count in messages(receivers, sent):
        rows.append(Traffic("forward", number, peer, groups, count * size))
        rows.append(Traffic("backward", number, peer, groups, count * size))
    if gradient_dtypes is not None:
        tables = KeyTables(replace(call, rank=rank))
        for number, peer, count in messages(senders, received):
            has_one_owner = len(distances[number - 1]) == 1
            blocks = [(rank, peer)] if has_one_owner else []
            dtype = gradient_dtypes.of(partial(tables.are_one_call, blocks))
            gradient_size = heads * sum(dims) * dtype.itemsize
            rows.append(Traffic("backward", number, peer, groups, count * gradient_size))
    return rows


# If all heads of a rank were sent at once, messages would grow with the number of rows. Heads are
# therefore sent and computed in groups. The work on a group must keep a GPU busy for longer than
# the host needs to post the next group. There is therefore one group for each 4,096 rows that a
# document has on a rank. If documents are too short for this, groups only limit memory, and there
# is at least one group for each 16,384 rows of a rank. Rows are not divided, because each group of
# rows would need its own tables.
_ROWS_PER_GROUP = 4096
_ROWS_PER_SHORT_GROUP = 16384


class HeadSlices(NamedTuple):
    """A group of heads: some KV heads, and the query heads that share them."""

    queries: slice
    keys: slice

    def operands(self, operands: Operands) -> Operands:
        q, k, v, sinks = operands
        sinks = None if sinks is None else sinks[self.queries]
        return Operands(q[:, :, self.queries], k[:, :, self.keys], v[:, :, self.keys], sinks)

    def output(self, output: OutputGradient) -> OutputGradient:
        dout, lse = (x[:, :, self.queries] for x in (output.dout, output.lse))
        out, dlse, delta = (
            None if x is None else x[:, :, self.queries]
            for x in (output.out, output.dlse, output.delta)
        )
        return OutputGradient(dout, out, lse, dlse, delta)

    def put(self, total: PartialGradients, gradients: Sequence[Tensor]) -> None:
        """Write the sums of dq, dk and dv of a group of heads to tensors that contain all heads.

        `total` contains the sums, which are rounded to the dtypes of the tensors. `gradients` are
        the tensors dq, dk and dv.
        """
        total.queries.finish(gradients[0][:, :, self.queries])
        for x, part in zip(gradients[1:], total.keys.results, strict=False):
            x[:, :, self.keys] = part


def gradients_by_group(
    groups: Sequence[HeadSlices],
    output: OutputGradient,
    operands: Operands,
    add: Callable[[HeadSlices, OutputGradient, Operands, PackedGradients], None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of all heads, computed for one group of heads after another.

    `add` is called once for each group. Its arguments are the group, the group's output, the
    group's operands, and the sums to which it adds the group's gradients. With one group, the
    result may be in the accumulator's dtype. With several groups, gradients are rounded to the
    dtype of q, so that the sums of only one group are in memory at a time.
    """
    q, k, v, _ = operands
    if len(groups) == 1:
        total = PartialGradients.zeros(q, k, v)
        add(groups[0], output, operands, total)
        return total.results()
    gradients: list[Tensor] = []
    for heads in groups:
        own = heads.operands(operands)
        total = PartialGradients.zeros(own.q, own.k, own.v)
        add(heads, heads.output(output), own, total)
        # The result is allocated only now, because its memory was needed for messages during the
        # first group.
        gradients = gradients or [x.new_empty(x.shape) for x in (q, k, v)]
        heads.put(total, gradients)
        del total  # freed before the sums of the next group are made
    return gradients[0], gradients[1], gradients[2]


def head_groups(shape: OperandShape, layout: Geometry, mask: Mask) -> list[HeadSlices]:
    """Return the groups of heads that are sent and computed one after another.

    The groups are the same on all ranks. Each group has at least one KV head. With one document and
    no window, there is one group for each 4,096 rows of the rank with the most rows. With short
    documents or a window, there are fewer groups.
    """
    layout = layout.worst_case
    rows = layout.most_tokens * shape.batch
    for_work = rows * _attended(layout, mask) // max(layout.tokens, 1) // _ROWS_PER_GROUP
    return divided_heads(shape, max(for_work, rows // _ROWS_PER_SHORT_GROUP))


def divided_heads(shape: OperandShape, groups: int) -> list[HeadSlices]:
    """Divide the heads into `groups` groups, or into one group per KV head if `groups` is
    larger.
    """
    groups = max(1, min(shape.kv_heads, groups))
    edges = pairwise(i * shape.kv_heads // groups for i in range(groups + 1))
    shared = shape.heads // max(shape.kv_heads, 1)  # inside USP, a rank may have no heads
    return [HeadSlices(slice(a * shared, b * shared), slice(a, b)) for a, b in edges]


def _attended(layout: Geometry, mask: Mask) -> int:
    """Return a measure of the work per token: the document's length, averaged over all tokens.

    With a window, the length of a document counts as at most 2w + 1, where w is the larger side of
    the window. Causal masks have no effect.
    """
    reach = 2 * max(mask.left, mask.right) + 1
    if mask.prefix is not None or mask.ranges is not None:
        reach = UNLIMITED

    def build() -> int:
        lengths = layout.lengths
        return int((lengths * np.minimum(lengths, reach)).sum()) // max(layout.tokens, 1)

    return layout.derived(("attended", reach), build)

"""Divide heads among ranks, and send each head to the rank that computes attention of the head.

The ranks form a mesh, and the ranks of a *mesh row* exchange heads with each other. In Ulysses, all
ranks form a single mesh row. Before the exchange, a rank has all heads of its own tokens. After the
exchange, it has some heads of all tokens in its mesh row, ordered by document and position. A
second exchange returns the results. Heads are exchanged and computed in groups, so that the
messages of one group are sent while another group is computed.

Letters of shapes: B is the batch, T_local the number of this rank's tokens, T_merged the number of
tokens in the mesh row, H the number of all heads, h the number of heads of one group, and D the
head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from torch import Tensor

from seqpar.comm.messages.comm import Arriving, Comm, SubComm
from seqpar.comm.messages.message_header import Message
from seqpar.core.dtypes import accumulator_dtype
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.heads.head_messages import MergedRows, MessageBlock, Operand


@dataclass(frozen=True)
class HeadGroup:
    """Heads that a rank computes together: query heads `q`, and the KV heads `kv` that they use.

    In a group, each KV head is used by the same number of query heads.
    """

    q: slice
    kv: slice
    first: bool  # whether it is the rank's first group with these KV heads
    last: bool  # whether it is the rank's last group with these KV heads

    @property
    def q_count(self) -> int:
        return self.q.stop - self.q.start

    @property
    def kv_count(self) -> int:
        return self.kv.stop - self.kv.start

    @property
    def arriving_kv(self) -> slice:
        """The KV heads that the rank receives with this group.

        The slice is empty if the rank has received these KV heads with an earlier group.
        """
        return self.kv if self.first else slice(0, 0)

    @property
    def leaving_kv(self) -> slice:
        """The KV heads whose gradients are complete after this group.

        The slice is empty if a later group adds to the gradients of these KV heads.
        """
        return self.kv if self.last else slice(0, 0)


class HeadGroups:
    """The heads of all ranks in a mesh row, divided into groups.

    Rank r of P computes the query heads ⌊rHq/P⌋ … ⌊(r+1)Hq/P⌋ − 1, and receives the KV heads that
    these query heads use. With `whole_on_ranks`, rank r computes all query heads that use the KV
    heads ⌊rHkv/P⌋ … ⌊(r+1)Hkv/P⌋ − 1.

    Each rank cuts its query heads into `groups` groups, or into fewer groups if it has fewer heads.
    With `whole_kv`, all query heads of a KV head are in one group. Within a group, all KV heads are
    used by equal numbers of query heads. If this is impossible with `groups` groups, the rank has
    more groups.
    """

    def __init__(
        self,
        ranks: int,
        q_heads: int,
        kv_heads: int,
        groups: int,
        whole_kv: bool,
        whole_on_ranks: bool = False,
    ) -> None:
        self._group_size = q_heads // kv_heads  # the number of query heads per KV head
        self._whole_kv = whole_kv
        # The number of query heads that are not separated.
        unit = self._group_size if whole_on_ranks else 1
        edges = [rank * (q_heads // unit) // ranks * unit for rank in range(ranks + 1)]
        cuts = [self._cut(start, stop, groups) for start, stop in pairwise(edges)]
        self.count = max(map(len, cuts)) - 1  # the largest number of groups of a rank
        padded = [cut + cut[-1:] * (self.count + 1 - len(cut)) for cut in cuts]
        self._ranks = [self._groups(cut) for cut in padded]
        sent = (group.arriving_kv for rank in self._ranks for group in rank)
        # Whether a KV head is sent to several ranks.
        self.kv_on_several_ranks = sum(kv.stop - kv.start for kv in sent) > kv_heads

    def group(self, number: int) -> list[HeadGroup]:
        """Return group `number` of each rank, in the order of the ranks.

        The group is empty on a rank that has fewer groups.
        """
        return [rank[number] for rank in self._ranks]

    def of_rank(self, rank: int) -> list[HeadGroup]:
        return self._ranks[rank]

    def _cut(self, start: int, stop: int, groups: int) -> list[int]:
        size = self._group_size
        # The range of query heads between start and stop whose KV heads have all of their query
        # heads in this range.
        whole_start = min(stop, -(-start // size) * size)
        whole_stop = max(start, stop // size * size)
        cuts = sorted({start, whole_start, whole_stop, stop}) if stop > start else [start, stop]
        while len(cuts) <= groups:
            widest, widest_start = max((b - a, a) for a, b in pairwise(cuts))
            if widest < 2 or (self._whole_kv and widest <= size):
                break
            unit = size if widest > size else 1
            cuts = sorted([*cuts, widest_start + widest // unit // 2 * unit])
        return cuts

    def _groups(self, cuts: list[int]) -> list[HeadGroup]:
        groups: list[HeadGroup] = []
        for start, stop in pairwise(cuts):
            kv_start = start // self._group_size
            kv = slice(kv_start, -(-stop // self._group_size) if stop > start else kv_start)
            continued = bool(groups) and (stop == start or kv == groups[-1].kv)
            if groups and kv == groups[-1].kv:
                groups[-1] = replace(groups[-1], last=False)
            groups.append(HeadGroup(slice(start, stop), kv, first=not continued, last=True))
        return groups


divide_heads = cache(HeadGroups)


Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class GroupPlan:
    own: HeadGroup  # the heads of this rank in the group
    # The call for these heads, as if each mesh row was a single rank with all tokens of the row.
    call: ResolvedCall
    # The messages that are exchanged before the group is computed, and those exchanged afterwards.
    arriving: list[MessageBlock]
    leaving: list[MessageBlock]
    kept: list[MessageBlock]  # the messages that forward received and kept for backward

    def sinks(self, sinks: Tensor | None) -> Tensor | None:
        return None if sinks is None else sinks[self.own.q]

    def keys(self, heads: Tensors, before: list[Tensor]) -> list[Tensor]:
        if self.own.first or not self.own.kv_count:
            return [heads["k"], heads["v"]]
        return before


class HeadPlan:
    """The tensors and groups of heads that a rank exchanges with its mesh row in one pass.

    A pass is a forward or a backward. Tensors have these names: q, k, v, out, lse, dq, dk, dv,
    dout, dlse and delta.
    """

    def __init__(
        self,
        call: ResolvedCall,
        rank: int,
        heads: HeadGroups,
        size: int,
        arriving: Sequence[str],
        leaving: Sequence[str],
        kept: Sequence[str] = (),
    ) -> None:
        """Find the tensors and the groups of heads that this rank exchanges in a forward or
        backward.

        Args:
            call: the arguments of the attention call, without the tensors.
            rank: this rank.
            heads: the heads of all ranks in a mesh row.
            size: the number of ranks in a mesh row.
            arriving: the names of the tensors that are exchanged before the attention of a group.
            leaving: the names of the tensors that are exchanged after the attention of a group.
            kept: the names of the tensors that forward received and kept for backward.
        """
        self.index, shape = rank % size, call.shape  # the index of this rank in its mesh row
        self.row = range(rank - self.index, rank - self.index + size)
        self.column = range(self.index, call.ranks, size)
        # If several ranks compute with a KV head, the rank that holds the tokens adds up the dk and
        # dv of these ranks. The contributions are then sent in the accumulator's dtype. Otherwise
        # dk and dv are complete, and are sent in q's dtype.
        self._shape, self.adds_kv = shape, heads.kv_on_several_ranks
        self.kv_dtype = accumulator_dtype(shape.dtype) if self.adds_kv else shape.dtype
        self._queries = self._keys = MergedRows.of(call.layout, self.row)
        if call.kv_layout is not call.layout and call.kv_layout.digest != call.layout.digest:
            self._keys = MergedRows.of(call.kv_layout, self.row)
        self.kv_tokens = self._keys.counts[self.index]  # the number of this rank's keys
        merged = merged_call(call, rank, size)
        # In the order in which the groups are computed.
        self.groups = [
            GroupPlan(
                own := heads.group(number)[self.index],
                call_of_heads(merged, own),
                *(self._blocks(names, heads.group(number)) for names in (arriving, leaving, kept)),
            )
            for number in range(heads.count)
        ]

    def _blocks(self, names: Sequence[str], groups: list[HeadGroup]) -> list[MessageBlock]:
        by_dtype: dict[object, list[Operand]] = {}
        for operand in (self._operand(name, groups) for name in names):
            by_dtype.setdefault(operand.dtype, []).append(operand)
        batch = self._shape.batch
        return [
            MessageBlock(operands, self.row, self.index, batch) for operands in by_dtype.values()
        ]

    def _operand(self, name: str, groups: list[HeadGroup]) -> Operand:
        shape, q_heads = self._shape, [group.q for group in groups]
        if name in ("lse", "delta", "dlse"):
            return Operand(name, accumulator_dtype(shape.dtype), self._queries, q_heads, None)
        dim = shape.dim if name.endswith(("q", "k")) else shape.value_dim
        if name in ("q", "dq", "out", "dout"):
            return Operand(name, shape.dtype, self._queries, q_heads, dim)
        if name in ("k", "v"):
            kv_heads = [group.arriving_kv for group in groups]
            return Operand(name, shape.dtype, self._keys, kv_heads, dim)
        kv_heads = [group.leaving_kv for group in groups]
        return Operand(name, self.kv_dtype, self._keys, kv_heads, dim, add=self.adds_kv)


def merged_call(call: ResolvedCall, rank: int, size: int) -> ResolvedCall:
    """Return the arguments of the attention that a rank computes after ranks have exchanged heads.

    After the exchange, a rank has some heads of all tokens of the `size` ranks in its mesh row. The
    returned layouts therefore treat the ranks of a mesh row as one rank. The returned object
    contains no tensors of the call, so it may live as long as the layouts.
    """
    return replace(call, max_logits=None).altered(
        rank=rank // size,
        layout=call.layout.merged_ranks(size),
        kv_layout=call.kv_layout.merged_ranks(size),
        options=call.options.with_slopes(None),
    )


def call_of_heads(call: ResolvedCall, group: HeadGroup) -> ResolvedCall:
    return call.altered(shape=call.shape._replace(heads=group.q_count, kv_heads=group.kv_count))


def in_heads(blocks: list[MessageBlock], merged: Sequence[Tensor]) -> Tensors:
    return {
        name: x
        for block, flat in zip(blocks, merged, strict=True)
        for name, x in zip(block.names, block.in_heads(flat), strict=True)
    }


class HeadExchange:
    def __init__(
        self,
        comm: Comm,
        plan: HeadPlan,
        label: str,
        outer_name: str,
        make_results: Callable[[], Tensors],
    ) -> None:
        """Prepare the exchange of heads.

        Args:
            comm: all ranks of the call.
            plan: this rank's plan.
            label: the name of the call's messages in errors and traces.
            outer_name: the name of the outer strategy's messages in errors and traces.
            make_results: a function that allocates the tensors of the results, such as (B, T_local,
                H, D). The function is called when the first result has arrived.
        """
        self._comm, self._plan, self._label = comm, plan, f"{label}, heads"
        between = comm.channel("rows") if len(plan.column) > 1 else comm
        # For the messages of the outer strategy, between the ranks of this rank's mesh column.
        self.outer = SubComm(between, plan.column, outer_name, label)
        self._make_results, self._results = make_results, Tensors()
        self._returning: tuple[list[MessageBlock], Arriving] | None = None
        self._sent_back = 0  # the number of groups whose results were sent

    def arrivals(self, tensors: Tensors) -> Iterator[list[Tensor]]:
        """Yield the heads that this rank computes, one group after another, as lists of buffers.

        `tensors` are this rank's tokens with all heads, (B, T_local, H, D). The function `in_heads`
        returns the tensors in the buffers. While the caller computes a group, the messages of the
        next group are sent.
        """

        def post(number: int) -> Arriving:
            blocks = self._plan.groups[number].arriving
            flats = [block.pack_tokens([tensors[name] for name in block.names]) for block in blocks]
            return self._post(blocks, flats, True, number)

        arriving, count = post(0), len(self._plan.groups)
        for number, group in enumerate(self._plan.groups):
            current = arriving
            if number + 1 < count:
                arriving = post(number + 1)
            yield [block.merge(x) for block, x in zip(group.arriving, current.wait(), strict=True)]

    def send_back(self, tensors: Tensors) -> None:
        """Send the results of a group, (B, T_merged, h, D), to the ranks that hold the tokens.

        Call this method once for each group, in the order of the groups. The method removes all
        tensors from `tensors`. It waits for the results of the preceding group before it sends the
        results of this group.
        """
        blocks = self._plan.groups[self._sent_back].leaving
        flats = [block.pack_heads([tensors[name] for name in block.names]) for block in blocks]
        # Frees the tensors, so that only messages are held while the next group is computed.
        tensors.clear()
        self._collect()
        self._returning = blocks, self._post(blocks, flats, False, self._sent_back)
        self._sent_back += 1

    def results(self) -> Tensors:
        self._collect()
        return self._results

    def _collect(self) -> None:
        if self._returning is None:
            return
        blocks, arriving = self._returning
        self._returning = None
        self._results = self._results or self._make_results()
        for block, flat in zip(blocks, arriving.wait(), strict=True):
            block.unpack_tokens(flat, [self._results[name] for name in block.names])

    def _post(
        self, blocks: list[MessageBlock], flats: list[Tensor], to_heads: bool, step: int
    ) -> Arriving:
        """Post messages, whose contents are in the buffers `flats`.

        With `to_heads`, each head is sent to the rank that computes it, and the buffers contain all
        heads of this rank's own tokens. Without `to_heads`, results are sent to the ranks that hold
        the tokens, and the buffers contain this rank's heads of all tokens in the mesh row.
        """
        sends: list[Message] = []
        recvs: list[Message] = []
        arriving = []
        for block, flat in zip(blocks, flats, strict=True):
            sizes, other_sizes = block.token_sizes, block.head_sizes
            if to_heads:
                other = flat.new_empty(block.head_elements)
            else:
                sizes, other_sizes = other_sizes, sizes
                other = flat.new_empty(block.token_elements)
            ours, theirs = flat.split_with_sizes(sizes), other.split_with_sizes(other_sizes)
            for number in block.own:
                theirs[number].copy_(ours[number])
            sends += [(rank, ours[number]) for number, rank in block.others]
            recvs += [(rank, theirs[number]) for number, rank in block.others]
            arriving.append(other)
        pending = self._comm.exchange(sends, recvs, label=self._label, step=step)
        return Arriving(arriving, pending)

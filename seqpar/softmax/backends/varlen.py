"""Compute attention with varlen kernels, which compute many documents in one call.

A varlen kernel, such as FlashAttention's, computes many *segments* in one call. A segment is a
range of query rows and a range of key rows. All segments of a call share one window (left, right),
which is counted from the last query and the last key of a segment: of m keys, row i of n queries
attends to the key rows i + m − n − left … i + m − n + right. −1 means no limit.

Letters of shapes: B is the batch, T the number of query rows, n and m the numbers of query rows and
key rows of a call in all batch entries, Hq and Hkv the numbers of query heads and KV heads, D the
head dim of q and k, and Dv the head dim of v.
"""

from __future__ import annotations

import warnings
from bisect import bisect, insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.core.arguments import Ints
from seqpar.core.device_tables import on_device, rehearsing
from seqpar.core.memo import LOCAL, Memo
from seqpar.core.ranges import union
from seqpar.kernels.steps import step
from seqpar.layout.masks.mask import Slices
from seqpar.softmax.backends import reference
from seqpar.softmax.backends.compile_ahead import compile_ahead
from seqpar.softmax.backends.kernel_operands import (
    aligned_heads,
    joint_head_dim,
    lse_columns,
    positive_options,
    with_dlse,
    with_lse_columns,
)
from seqpar.softmax.backends.pieces import key_runs
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import OutputGradient, Partial, PartialGradients
from seqpar.softmax.wire.row_messages import Rows, add_rows

Window = tuple[int, int]
# cuDNN builds a plan for each new shape, so it gets only calls whose segments have lengths that are
# multiples of this number. Lengths that change from step to step are seldom such multiples.
_DENSE_ROWS = 128


KeyRange = tuple[int, int]  # the first row, and the row after the last one


class VarlenSegment(NamedTuple):
    q_start: int
    q_stop: int
    # A full segment may have several ranges, because the order of its keys has no effect.
    keys: tuple[KeyRange, ...]
    # The window that the segment needs. A side that masks no key is −1.
    left: int
    right: int

    @property
    def is_full(self) -> bool:
        return self.left == self.right == -1

    @property
    def key_count(self) -> int:
        return sum(stop - start for start, stop in self.keys)

    def fits(self, window: Window) -> bool:
        """Return whether the segment keeps its (query, key) pairs if it is computed under
        `window`.
        """
        # A side of at least this size masks no key.
        unlimited_from = self.key_count - 1, self.q_stop - self.q_start - 1
        return all(
            side == needed or (needed == -1 and side >= unlimited)
            for needed, side, unlimited in zip(self[3:], window, unlimited_from, strict=True)
        )


class VarlenTables(NamedTuple):
    # int32 (n + 1,): the row of the call at which each of the n segments begins.
    cu_q: Tensor
    cu_k: Tensor
    longest_q: int  # the query rows of the longest segment
    longest_k: int  # the key rows of the longest segment, or a larger number
    window: Window  # the window of all segments
    # Query rows and key rows of each segment, or None (see `VarlenCall.dense`).
    dense: tuple[int, int] | None


class VarlenCall:
    """One call of a varlen kernel, which computes many segments.

    A segment is a range of query rows and a range of key rows. No two segments of the call share a
    query row. If two segments share key rows, the call is used only in forward.

    Attributes:
        queries, keys: the rows of all segments, in the order of the segments.
        query_key: the ranges of query rows as bytes. Calls with the same query rows have equal
            bytes, so that dictionaries can be indexed by them.
        dense: the number of query rows and the number of key rows of each segment if the call is
            dense, or None. In a dense call, all segments have the same two numbers, which are
            multiples of 128. Either all segments have full masks, or all segments have causal masks
            and as many keys as queries.
    """

    def __init__(self, segments: Sequence[VarlenSegment], window: Window) -> None:
        queries, keys = (
            _joined(np.array(pairs, dtype=np.int64))
            for pairs in ([x[:2] for x in segments], [pair for x in segments for pair in x.keys])
        )
        self.queries, self.keys, self.query_key = Rows(queries), Rows(keys), queries.tobytes()
        lengths = [(x.q_stop - x.q_start, x.key_count) for x in segments]
        self._lengths = np.array(lengths, dtype=np.int64).T
        self._window = window
        is_dense = len({*lengths}) == 1 and _is_dense(*lengths[0], window)
        self.dense = lengths[0] if is_dense else None
        self._tables = Memo()

    def tables(self, batch: int, device: torch.device) -> VarlenTables:
        """Return the segments of all batch entries as tensors on a device.

        The rows of the first batch entry are followed by the rows of the second batch entry, and so
        on.
        """

        def build() -> VarlenTables:
            edges = (np.r_[0, np.tile(x, batch).cumsum()].astype(np.int32) for x in self._lengths)
            cu_q, cu_k = map(torch.from_numpy, edges)
            longest_q, longest_k = (int(x.max()) for x in self._lengths)
            # If only the left side of the window is limited, FlashAttention-2 uses longest_k as the
            # right side. It treats a right side of at least longest_k as unlimited.
            longest_k = max(longest_q, longest_k)
            return VarlenTables(cu_q, cu_k, longest_q, longest_k, self._window, self.dense)

        on_host = self._tables(batch, build)
        if device.type == "cpu":
            return on_host

        def place() -> VarlenTables:
            cu_q, cu_k = (on_device(x, device) for x in on_host[:2])
            return on_host._replace(cu_q=cu_q, cu_k=cu_k)

        return place() if rehearsing() else self._tables((LOCAL, batch, device), place)

    def request_tables(self, batch: int, device: torch.device) -> None:
        self.tables(batch, device)
        self.queries.local(device)
        self.keys.local(device)


class VarlenWork(NamedTuple):
    """The calls of a varlen kernel that compute some slices, and the slices that it cannot
    compute.
    """

    calls: list[VarlenCall]
    remaining: Slices | None


def varlen_work(slices: Slices, repeats_keys: bool = False) -> VarlenWork:
    """Return the kernel calls that compute attention over the slices of a block.

    A *slice* is a range of query rows and a range of key rows with a mask. With `repeats_keys`, one
    call may read the same key rows several times, so that fewer calls are needed. Such calls can be
    used only in forward.
    """
    name = "varlen work with repeated keys" if repeats_keys else "varlen work"
    return slices.derived(name, lambda: _build(slices, repeats_keys))


def _build(slices: Slices, repeats_keys: bool) -> VarlenWork:
    segments, remaining = list[VarlenSegment](), list[int]()
    for i in range(len(slices)):
        first = int(slices.q_rows[i, 0]), int(slices.k_rows[i, 0])
        parts = _segments(*first, *slices.key_intervals(i))
        if parts is None:
            remaining.append(i)
        else:
            segments += parts
    calls = []
    for window, members in _by_window(_join_keys(segments)).items():
        of_window = [VarlenCall(layer, window) for layer in _layers(members)]
        # The calls of one long document have one segment each. They are not joined, because they
        # are large enough, and a copy of the document's keys would take much memory.
        has_short_segments = 1 < len(of_window) < len(members)
        if repeats_keys and has_short_segments:
            of_window = _with_repeated_keys(members, window) or of_window
        calls += of_window
    if not remaining:
        return VarlenWork(calls, None)
    tables = {name: getattr(slices, name)[remaining] for name in ("q_rows", "k_rows", "bands")}
    return VarlenWork(calls, replace(slices, **tables, derived=Memo()))


def _segments(q_start: int, k_start: int, start: Ints, stop: Ints) -> list[VarlenSegment] | None:
    """Return the segments of a slice, or None if varlen kernels cannot compute it.

    Row i of the slice attends to the key rows k_start + start[i] … k_start + stop[i] − 1.
    """
    with_keys = np.flatnonzero(stop > start)
    if not with_keys.size:
        return []
    kept = slice(int(with_keys[0]), int(with_keys[-1]) + 1)
    q_start, q_stop = q_start + kept.start, q_start + kept.stop
    first = int(start[kept.start])
    k_start, start, stop = k_start + first, start[kept] - first, stop[kept] - first
    rows, keys, row = stop.size, int(stop[-1]), np.arange(stop.size)
    low, high = int(start[-1]) - rows + 1, int(stop[0])
    left = keys - rows - low if start[-1] else -1
    right = high - 1 - keys + rows if high < keys else -1
    is_band = (left < 0 or (start == np.maximum(row + low, 0)).all()) and (
        high == keys or (stop == np.minimum(row + high, keys)).all()
    )
    if not is_band:
        if (runs := key_runs(start, stop)) is None:
            return None
        moved = np.add(runs, [q_start, q_start, k_start, k_start])
        return [VarlenSegment(a, b, ((c, d),), -1, -1) for a, b, c, d in moved.tolist()]
    key_range = ((k_start, k_start + keys),)
    # First the rows under a causal mask, then the rows that attend to all keys.
    if left < 0 < right:
        cut = keys - high + 1
        causal = VarlenSegment(q_start, q_start + cut, key_range, -1, 0)
        return [causal, VarlenSegment(q_start + cut, q_stop, key_range, -1, -1)]
    return [VarlenSegment(q_start, q_stop, key_range, left, right)]


def _join_keys(segments: list[VarlenSegment]) -> list[VarlenSegment]:
    full: dict[tuple[int, int], list[KeyRange]] = {}
    for x in segments:
        if x.is_full:
            full.setdefault(x[:2], []).extend(x.keys)
    joined = [VarlenSegment(*rows, tuple(sorted(keys)), -1, -1) for rows, keys in full.items()]
    return [*(x for x in segments if not x.is_full), *joined]


def _by_window(segments: list[VarlenSegment]) -> dict[Window, list[VarlenSegment]]:
    """Group segments by the window under which they are computed.

    If a segment has the same (query, key) pairs under several windows, it joins the first group
    whose window gives these pairs.
    """
    groups: dict[Window, list[VarlenSegment]] = {}
    for x in sorted(segments, key=lambda x: (x.left < 0) + (x.right < 0)):
        window = next(filter(x.fits, groups), (x.left, x.right))
        groups.setdefault(window, []).append(x)
    return groups


def _layers(segments: list[VarlenSegment]) -> list[list[VarlenSegment]]:
    """Divide segments into lists, so that no two segments of one list share a row.

    Each list is ordered by query rows.
    """
    layers: list[list[VarlenSegment]] = []
    taken: list[list[KeyRange]] = []  # the key rows of each list, ascending
    for x in sorted(segments, key=lambda x: (x.q_start, x.keys)):
        for layer, ranges in zip(layers, taken, strict=True):
            if layer[-1].q_stop <= x.q_start and all(_is_free(pair, ranges) for pair in x.keys):
                break
        else:
            layer, ranges = [], []
            layers.append(layer)
            taken.append(ranges)
        layer.append(x)
        for pair in x.keys:
            insort(ranges, pair)
    return layers


def _is_free(pair: KeyRange, ranges: list[KeyRange]) -> bool:
    i = bisect(ranges, pair)
    starts_after = i == 0 or ranges[i - 1][1] <= pair[0]
    return starts_after and (i == len(ranges) or pair[1] <= ranges[i][0])


# In forward, a call may read each of its key rows at most this number of times, on average. On a
# zigzag layout, it reads the keys of an earlier rank twice, and the keys of a later rank once.
_MOST_READS = 2


def _with_repeated_keys(segments: list[VarlenSegment], window: Window) -> list[VarlenCall] | None:
    """Return a list with a single call that computes all segments, or None.

    A *segment* is a range of query rows and a range of key rows. Each query row of the call is in
    one segment, which contains all keys to which the row attends. The result is None if some
    segment has a mask, or if the call would read too many key rows.
    """
    if not all(x.is_full for x in segments):
        return None
    table = np.array(sorted(pair for x in segments for pair in x.keys), dtype=np.int64)
    left_to_read = _MOST_READS * int(np.diff(union(*table.T)).sum())
    waiting, current, parts = sorted(segments, reverse=True), list[VarlenSegment](), []
    for start, stop in pairwise(sorted({edge for x in segments for edge in x[:2]})):
        current = [x for x in current if x.q_stop > start]
        while waiting and waiting[-1].q_start == start:
            current.append(waiting.pop())
        left_to_read -= sum(x.key_count for x in current)
        if left_to_read < 0:
            return None
        if current:
            keys = tuple(sorted(pair for x in current for pair in x.keys))
            parts.append(VarlenSegment(start, stop, keys, -1, -1))
    return [VarlenCall(parts, window)]


def _is_dense(rows: int, keys: int, window: Window) -> bool:
    is_full_or_square = window == (-1, -1) or (window == (-1, 0) and rows == keys)
    return is_full_or_square and not (rows % _DENSE_ROWS or keys % _DENSE_ROWS)


def _joined(ranges: Ints) -> Ints:
    begins = np.r_[True, ranges[1:, 0] != ranges[:-1, 1]]
    ends = np.r_[begins[1:], True]
    return np.stack([ranges[begins, 0], ranges[ends, 1]], 1)


_HALF = (torch.bfloat16, torch.float16)


@cache
def _warn_of_triton() -> None:
    warnings.warn(
        "our Triton kernels compute the backward of attention: with deterministic=True it must "
        "give the same bits each time, and the fastest kernel that is installed does not. On an "
        "H200 this backward takes twice as long as with cuDNN. Install a package whose backward is "
        "deterministic (`python -m seqpar info` names it), or pass deterministic=False",
        stacklevel=2,
    )


class BackwardRows(NamedTuple):
    """The rows of a varlen call that a backward kernel reads.

    dout, q and out are (n, Hq, D), k and v are (m, Hkv, D), and lse and dlse are (Hq, n). out and
    lse are the results of forward over all keys on all ranks. dlse, the gradient of lse, is None in
    two cases: if lse has no gradient, or if dout contains this gradient (`lse_columns`).
    """

    dout: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None
    k: Tensor
    v: Tensor


class HeadDims(NamedTuple):
    dtype: torch.dtype
    dim: int
    value_dim: int

    @classmethod
    def of(cls, q: Tensor, v: Tensor) -> HeadDims:
        return cls(q.dtype, q.shape[-1], v.shape[-1])


# Takes q (n, Hq, D), k and v (m, Hkv, D). Returns out (n, Hq, D) and lse (Hq, n) in fp32.
Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
# Returns dq, dk and dv. They may have additional columns of zeros.
Backward = Callable[[BackwardRows], tuple[Tensor, Tensor, Tensor]]


class VarlenKernel(NamedTuple):
    """A kernel that computes all segments of a `VarlenCall`, in bf16 or fp16.

    A segment is a range of query rows and a range of key rows. All operands have the same head dim,
    which is a multiple of 8. The functions `forward` and `backward` return a function that takes
    the tensors and runs the kernel. Its results are new tensors, which callers may keep and change.
    """

    forward: Callable[[VarlenTables, CallOptions], Forward]
    backward: Callable[[VarlenTables, CallOptions], Backward]
    max_head_dim: int  # the largest D
    softcap: bool = False  # whether it computes scores with a softcap
    # Whether backward accepts dlse. If not, operands get additional columns for it (`lse_columns`).
    lse_gradient: bool = False
    # Whether backward has the same bits in each run if the options require it. If not, our Triton
    # kernels compute backward when the options require it.
    deterministic: bool = False
    only_dense: bool = False  # whether it can compute only calls with `VarlenCall.dense`
    # Returns a key of the variant that the kernel compiles in the first call with this key. None if
    # the kernel compiles nothing, or cannot compile ahead.
    variant: Callable[[VarlenTables, CallOptions], Hashable] | None = None

    def limits(self) -> dict[str, int]:
        """Return the fields that are numbers, by name, so that ranks can compare their kernels."""
        return {name: x for name, x in self._asdict().items() if isinstance(x, int)}

    def takes(self, operands: HeadDims, options: CallOptions, has_dlse: bool) -> bool:
        """Return whether the kernel supports these operands and options.

        `has_dlse` says whether lse has a gradient.
        """
        dtype, dim, value_dim = operands
        if dtype not in _HALF or options.slopes is not None:
            return False
        if has_dlse and not self.lse_gradient:
            value_dim += len(lse_columns(dtype))
        fits = max(dim, value_dim) <= self.max_head_dim
        return fits and (self.softcap or not options.softcap)

    def computes_all(self, q: Tensor, v: Tensor, slices: Slices, options: CallOptions) -> bool:
        """Return whether the kernel can compute all slices, even if lse has a gradient."""
        if not self.takes(HeadDims.of(q, v), options, True):
            return False
        calls, remaining = varlen_work(slices)
        is_dense = not self.only_dense or all(call.dense is not None for call in calls)
        return remaining is None and is_dense


class _Launch(NamedTuple):
    call: VarlenCall
    queries: Rows | None  # None means all rows
    keys: Rows | None  # None means all rows
    sign: int  # see `positive_scale`
    run: Any  # a `Forward` or a `Backward`


class VarlenBlock:
    """A backend that computes attention over one block of keys with varlen kernels.

    It can be used for all tensors with the device, dtype, head dims and options for which it was
    made.
    """

    forward_blocks = None  # `attend_blocks` calls `forward` for each block

    def __init__(
        self, kernels: dict[bool, VarlenKernel | None], q: Tensor, v: Tensor, slices: Slices
    ) -> None:
        """Choose the kernels for tensors with the device, dtype and head dims of q and v.

        `kernels[True]` is the kernel for calls in which lse has a gradient, and `kernels[False]`
        the kernel for all other calls. None means that no kernel can compute these calls.
        """
        self._kernels, self._width, kernel = kernels, joint_head_dim(q, v), kernels[False]
        # If segments repeat keys, their lengths may differ, and the call is not dense.
        repeats_keys = kernel is not None and not kernel.only_dense
        self._forward = (
            VarlenWork([], None) if kernel is None else varlen_work(slices, repeats_keys)
        )
        self._launches = Memo()

    def _prepared(
        self,
        prepare: Callable[..., Any],
        calls: list[VarlenCall],
        q: Tensor,
        k: Tensor,
        options: CallOptions,
    ) -> list[_Launch]:
        def build() -> list[_Launch]:
            positive, sign = positive_options(options)
            launches = []
            for call in calls:
                queries = None if call.queries.are_all(q.shape[1]) else call.queries
                keys = None if call.keys.are_all(k.shape[1]) else call.keys
                run = prepare(call.tables(q.shape[0], q.device), positive)
                launches.append(_Launch(call, queries, keys, sign, run))
            return launches

        return self._launches((prepare, q.shape[0]), build)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slices: Slices,
        partial: Partial,
        options: CallOptions,
    ) -> None:
        (calls, remaining), kernel, width = self._forward, self._kernels[False], self._width
        # This object is stored with the slices, so it must not refer to them itself.
        if kernel is None:
            remaining = slices
        if remaining is not None:
            reference.forward(q, k, v, remaining, partial, options)
        if kernel is None or not calls:
            return
        value_dim, batch = v.shape[-1], q.shape[0]
        if rehearsing():
            for call in calls:
                call.request_tables(batch, q.device)
                partial.request_tables(call.queries)
                self._compile(kernel, call, q, k, options)
            return
        k, v = aligned_heads(k, width), aligned_heads(v, width)
        for launch in self._prepared(kernel.forward, calls, q, k, options):
            call, _, keys, _, run = launch
            partial.make_room(call.queries.count, q.dtype, width)
            rows = _ScaledQueries.of(partial, q, launch, width)
            out, lse = step(run, rows, _flat(k, keys), _flat(v, keys))
            out = _columns(_batched(out, batch), value_dim)
            partial.merge(call.queries, out, _batched(lse.T, batch), is_owned=True)

    def backward(
        self,
        output: OutputGradient,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slices: Slices,
        gradients: PartialGradients,
        options: CallOptions,
    ) -> None:
        has_dlse = output.dlse is not None
        kernel = self._kernels[has_dlse]
        if kernel is None:
            reference.backward(output, q, k, v, slices, gradients, options)
            return
        if options.deterministic and not kernel.deterministic:
            from seqpar.softmax.backends import triton

            _warn_of_triton()
            triton.backward(output, q, k, v, slices, gradients, options)
            return
        calls, remaining = varlen_work(slices)
        if remaining is not None:
            reference.backward(output, q, k, v, remaining, gradients, options)
        if not calls:
            return
        batch, dim, value_dim, width = q.shape[0], q.shape[-1], v.shape[-1], self._width
        if rehearsing():
            for call in calls:
                call.request_tables(batch, q.device)
                gradients.queries.request_tables(call.queries)
                self._compile(kernel, call, q, k, options, output)
            return
        has_columns = has_dlse and not kernel.lse_gradient
        if has_columns:
            v = with_lse_columns(v)
            width = joint_head_dim(q, v)
        k, v = aligned_heads(k, width), aligned_heads(v, width)
        for launch in self._prepared(kernel.backward, calls, q, k, options):
            call, _, some_keys, sign, run = launch
            gradients.queries.make_room(call.queries.count, q.dtype, width)
            gradients.keys.release()
            queries = _Queries.of(output, q, launch, width, has_columns, kernel.lse_gradient)
            rows = BackwardRows(*queries, _flat(k, some_keys), _flat(v, some_keys))
            dq, dk, dv = step(run, rows)
            dq = _columns(_batched(dq, batch), dim)
            dk = _columns(_batched(dk, batch), dim)
            dv = _columns(_batched(dv, batch), value_dim)
            gradients.queries.add(call.queries, dq, sign)
            if some_keys is not None or not gradients.keys.keep(dk, dv):
                keys = call.keys.local(q.device)
                add_rows(dk, gradients.dk, keys)
                add_rows(dv, gradients.dv, keys)

    def _compile(
        self,
        kernel: VarlenKernel,
        call: VarlenCall,
        q: Tensor,
        k: Tensor,
        options: CallOptions,
        output: OutputGradient | None = None,
    ) -> None:
        """Compile a kernel before its first call, if the package of the kernel can do this.

        With `output`, this method compiles the kernel's backward, and without `output` its forward.
        """
        if kernel.variant is None:
            return
        batch, heads, kv_heads, dtype = q.shape[0], q.shape[2], k.shape[2], q.dtype
        tables, is_forward = call.tables(batch, q.device), output is None
        # For queries of another rank, kernels get delta in the place of dlse; see `_Queries`.
        has_dlse = output is not None and (output.dlse is not None or output.out is None)
        rows, keys = batch * call.queries.count, batch * call.keys.count
        sizes = (rows, heads, self._width), (keys, kv_heads, self._width)

        def run(empty: Callable[..., Tensor]) -> None:
            queries, of_keys = (empty(size, dtype=dtype) for size in sizes)
            cu_q, cu_k = (empty(x.shape, dtype=x.dtype) for x in tables[:2])
            segments = tables._replace(cu_q=cu_q, cu_k=cu_k)
            if is_forward:
                kernel.forward(segments, options)(queries, of_keys, of_keys)
                return
            lse = empty((heads, rows), dtype=torch.float32)
            of_queries = queries, queries, queries, lse, lse if has_dlse else None
            kernel.backward(segments, options)(BackwardRows(*of_queries, of_keys, of_keys))

        kind = kernel, kernel.variant(tables, options), is_forward, has_dlse
        compile_ahead((*kind, heads, kv_heads, self._width), q, run)


class _ScaledQueries(NamedTuple):
    """The query rows of one call in forward, kept for the next call if it has the same query
    rows.
    """

    # The tensor and the key from which the rows were made.
    q: Tensor
    key: bytes
    rows: Tensor

    @classmethod
    def of(cls, partial: Partial, q: Tensor, launch: _Launch, width: int) -> Tensor:
        kept, key = partial.prepared, launch.call.query_key
        if isinstance(kept, cls) and kept.q is q and kept.key == key:
            return kept.rows
        partial.prepared = kept = None  # frees the rows of the call before
        rows = aligned_heads(_scaled(q, launch), width)
        partial.prepared = cls(q, key, rows)
        return rows


# The fields dout, q, out, lse and dlse of `BackwardRows`.
_QueryRows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


class _Queries(NamedTuple):
    """The query rows of one call in backward, kept for the next call if it has the same query
    rows.
    """

    # The tensor and the key from which the rows were made.
    q: Tensor
    key: tuple[bytes, int, bool, bool]
    tensors: _QueryRows

    @classmethod
    def of(
        cls,
        output: OutputGradient,
        q: Tensor,
        launch: _Launch,
        width: int,
        has_columns: bool,
        takes_dlse: bool,
    ) -> _QueryRows:
        kept, key = output.prepared, (launch.call.query_key, width, has_columns, takes_dlse)
        if isinstance(kept, cls) and kept.q is q and kept.key == key:
            return kept.tensors
        output.prepared = kept = None  # frees the rows of the call before
        queries = launch.queries
        dout, lse = _flat(output.dout, queries), _flat(output.lse, queries)
        if output.out is None and takes_dlse:
            # A kernel computes delta as out·dout − dlse, and reads out for nothing else. For
            # queries of another rank, delta is known and out is not. With zeros in place of out and
            # −delta in place of dlse, the kernel computes this delta.
            out = output.zeros.like(dout)
            dlse: Tensor | None = -_flat(output.ensure_delta(), queries)
        else:
            out = _flat(output.ensure_out(), queries)
            dlse = None if output.dlse is None else _flat(output.dlse, queries)
        if has_columns:
            assert dlse is not None
            dout, dlse = with_dlse(dout, dlse), None
        dout, rows, out = (aligned_heads(x, width) for x in (dout, _scaled(q, launch), out))
        dlse = None if dlse is None else dlse.t().contiguous()
        tensors = dout, rows, out, lse.t().contiguous(), dlse
        output.prepared = cls(q, key, tensors)
        return tensors


def _scaled(q: Tensor, launch: _Launch) -> Tensor:
    rows = _flat(q, launch.queries)
    return rows if launch.sign == 1 else rows * launch.sign


def _flat(x: Tensor, rows: Rows | None) -> Tensor:
    """Return the given rows of x (B, T, …), or all rows if `rows` is None, as (n, …).

    In the result, the rows of the second batch entry follow the rows of the first, and so on.
    """
    if rows is not None:
        local = rows.local(x.device)
        x = x[:, local] if isinstance(local, slice) else x.index_select(1, local)
    return x[0] if x.shape[0] == 1 else x.flatten(0, 1)


def _batched(x: Tensor, batch: int) -> Tensor:
    """Return x (B · n, …) as (B, n, …). The rows of a batch entry follow one another in x."""
    # `unflatten` takes several times as long.
    return x[None] if batch == 1 else x.unflatten(0, (batch, -1))


def _columns(x: Tensor, count: int) -> Tensor:
    return x if x.shape[-1] == count else x[..., :count]

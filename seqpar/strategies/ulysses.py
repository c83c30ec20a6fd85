"""Ulysses attention: tokens are exchanged for heads.

Jacobs et al., "DeepSpeed-Ulysses" (2023), section 3. An all-to-all gives each rank all tokens of some of the heads; it
attends over the whole packed batch; a second all-to-all brings the output home. Query heads go to ranks as evenly as they
divide, at most ⌈Hq/P⌉ each; a KV head goes to every rank that has one of its query heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from seqpar.attend import Gradients, Upstream, accumulator_dtype, attend_backward, attend_hops
from seqpar.comm import Comm
from seqpar.geometry import Geometry
from seqpar.mask import Slices, slices_between
from seqpar.strategies.base import Attention, Strategy
from seqpar.strategies.call import Call


class Heads:
    """Which heads each rank computes: query heads ⌊rHq/P⌋ … ⌊(r+1)Hq/P⌋ − 1 and the KV heads that they share."""

    def __init__(self, ranks: int, q_heads: int, kv_heads: int) -> None:
        self.group = q_heads // kv_heads
        edges = [rank * q_heads // ranks for rank in range(ranks + 1)]
        self.q = [slice(*pair) for pair in pairwise(edges)]
        first = [q.start // self.group for q in self.q]
        self.kv = [
            slice(start, -(-q.stop // self.group) if q.stop > q.start else start)
            for q, start in zip(self.q, first, strict=True)
        ]
        self.shared = sum(kv.stop - kv.start for kv in self.kv) > kv_heads  # some KV head is on several ranks

    def uniform(self, rank: int) -> Iterator[tuple[slice, slice]]:
        """A rank's query heads and KV heads (counted from its first) in parts whose groups have one size each.

        A rank's first and last KV head may have only some of their query heads there.
        """
        q, kv, group = self.q[rank], self.kv[rank], self.group
        first, last = min(q.stop, -(-q.start // group) * group), max(q.start, q.stop // group * group)
        cuts = sorted({q.start, first, last, q.stop})
        for start, stop in pairwise(cuts if len(cuts) > 1 else cuts * 2):  # without any heads, one empty part
            yield (
                slice(start - q.start, stop - q.start),
                slice(start // group - kv.start, -(-stop // group) - kv.start),
            )


class Ulysses(Strategy):
    name = "ulysses"

    @staticmethod
    def forward(comm: Comm, call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        heads = Heads(comm.size, q.shape[2], k.shape[2])
        arriving = [ToHeads(comm, call.layout, q, heads.q)]
        arriving += [ToHeads(comm, call.kv_layout, x, heads.kv) for x in (k, v)]
        q_heads, k_heads, v_heads = (x.wait() for x in arriving)
        sinks = None if call.sinks is None else call.sinks[heads.q[comm.rank]]
        parts = []
        for q_part, kv_part in heads.uniform(comm.rank):
            block = k_heads[:, :, kv_part], v_heads[:, :, kv_part]
            part_sinks = None if sinks is None else sinks[q_part]
            parts.append(attend_hops(q_heads[:, :, q_part], [block], [_slices(call)], call.scoring, part_sinks))
        out_heads, lse_heads = (x[0] if len(parts) == 1 else torch.cat(x, 2) for x in zip(*parts, strict=True))
        leaving = [ToTokens(comm, call.layout, out_heads, heads.q)]
        if call.wants_lse:
            leaving.append(ToTokens(comm, call.layout, lse_heads[..., None], heads.q))
        out, *lse = (x.wait() for x in leaving)
        unread = out.new_full(out.shape[:-1], torch.nan, dtype=lse_heads.dtype)
        return out, lse[0][..., 0] if lse else unread, [q_heads, k_heads, v_heads, out_heads, lse_heads]

    @staticmethod
    def backward(
        comm: Comm, call: Call, dout: Tensor, dlse: Tensor | None, residuals: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = residuals
        heads = Heads(comm.size, dout.shape[2], call.kv_heads)
        arriving = [ToHeads(comm, call.layout, dout, heads.q)]
        if dlse is not None:
            arriving.append(ToHeads(comm, call.layout, dlse[..., None], heads.q))
        dout, *dlse_heads = (x.wait() for x in arriving)
        sinks = None if call.sinks is None else call.sinks[heads.q[comm.rank]]
        up = Upstream.of(dout, dlse_heads[0][..., 0] if dlse_heads else None, out, lse, sinks)
        total = Gradients.zeros(q, k, v)
        for q_part, kv_part in heads.uniform(comm.rank):
            operands = q[:, :, q_part], k[:, :, kv_part], v[:, :, kv_part]
            attend_backward(up.heads(q_part), *operands, _slices(call), total.heads(q_part, kv_part), call.scoring)
        kv_dtype = total.dk.dtype if heads.shared else k.dtype  # a gradient with one contributor is already complete
        leaving = [ToTokens(comm, call.layout, total.dq.to(q.dtype), heads.q)]
        leaving += [ToTokens(comm, call.kv_layout, x.to(kv_dtype), heads.kv) for x in (total.dk, total.dv)]
        dq, dk, dv = (x.wait() for x in leaving)
        return dq, dk, dv

    @staticmethod
    def empty_residuals(comm: Comm, q: Tensor, k: Tensor, v: Tensor, tokens: int, kv_tokens: int) -> list[Tensor]:
        heads = Heads(comm.size, q.shape[2], k.shape[2])
        q_heads, kv_heads = (part[comm.rank].stop - part[comm.rank].start for part in (heads.q, heads.kv))
        rows = q.shape[0], tokens, q_heads
        keys = k.shape[0], kv_tokens, kv_heads
        return [
            q.new_empty((*rows, q.shape[3])),
            k.new_empty((*keys, k.shape[3])),
            v.new_empty((*keys, v.shape[3])),
            q.new_empty((*rows, v.shape[3])),
            q.new_empty(rows, dtype=accumulator_dtype(q.dtype)),
        ]


def _slices(call: Call) -> Slices:
    return slices_between(call.layout.packed, 0, call.kv_layout.packed, 0, call.mask)


class ToHeads:
    """x (B, T_local, H, D) on its way to (B, T, h, D): all tokens, in packed order, of this rank's heads."""

    def __init__(self, comm: Comm, layout: Geometry, x: Tensor, heads: list[slice]) -> None:
        self._order = layout.packed_order
        mine = heads[comm.rank]
        self._buffer = x.new_empty((layout.tokens, x.shape[0], mine.stop - mine.start, x.shape[3]))
        parts = self._buffer.split([holding.tokens for holding in layout.holdings])
        rows = x.transpose(0, 1)
        others = [peer for peer in range(comm.size) if peer != comm.rank]
        sends = [(peer, rows[:, :, heads[peer]].contiguous()) for peer in others]
        self._pending = comm.exchange(sends, [(peer, parts[peer]) for peer in others])
        parts[comm.rank].copy_(rows[:, :, mine])

    def wait(self) -> Tensor:
        self._pending.wait()
        if self._order is not None:
            self._buffer = self._buffer.index_select(0, torch.from_numpy(self._order).to(self._buffer.device))
        return self._buffer.transpose(0, 1)


class ToTokens:
    """x (B, T, h, D), in packed order, on its way home to (B, T_local, H, D); heads of several ranks are summed."""

    def __init__(self, comm: Comm, layout: Geometry, x: Tensor, heads: list[slice]) -> None:
        self._heads, batch = heads, x.shape[0]
        rows = x.transpose(0, 1)
        if layout.packed_order is None:
            parts = rows.split([holding.tokens for holding in layout.holdings])
        else:
            indices = (layout.token_indices(rank) for rank in range(comm.size))
            parts = tuple(rows.index_select(0, torch.from_numpy(index).to(x.device)) for index in indices)
        tokens = layout.holdings[comm.rank].tokens
        self._parts = [
            parts[rank] if rank == comm.rank else x.new_empty((tokens, batch, part.stop - part.start, x.shape[3]))
            for rank, part in enumerate(heads)
        ]
        others = [peer for peer in range(comm.size) if peer != comm.rank]
        sends = [(peer, parts[peer].contiguous()) for peer in others]
        self._pending = comm.exchange(sends, [(peer, self._parts[peer]) for peer in others])

    def wait(self) -> Tensor:
        self._pending.wait()
        heads = max(part.stop for part in self._heads)
        if sum(part.stop - part.start for part in self._heads) == heads:  # each head comes from one rank
            return torch.cat(self._parts, 2).transpose(0, 1)
        first = self._parts[0]
        total = first.new_zeros((*first.shape[:2], heads, first.shape[3]))
        for part, values in zip(self._heads, self._parts, strict=True):
            total[:, :, part] += values
        return total.transpose(0, 1)


class UlyssesAttention(Attention):
    __doc__ = (
        (Attention.__doc__ or "")
        + """
    Ulysses sends heads: an all-to-all of q, k and v before the attention, and one of its output after.

    A rank computes at most ⌈Hq/P⌉ query heads over the whole pack, whatever the layout. Query heads need not divide by the
    group, and there may be fewer KV heads than ranks; a KV head is sent to each rank that needs it.

    Bytes sent by rank r with Tr tokens (and Kr keys), where hq(p) and hkv(p) are the heads of rank p, over the other ranks
    p, and b bytes an element: forward Σ [Tr·hq(p)·D + Kr·hkv(p)·(D + Dv)]·B·b, then Σ Tp·hq(r)·(Dv·b)·B, and with
    `return_lse` or sinks 4 (8 for fp64) more for each token and head; backward Σ Tr·hq(p)·Dv·B·b (likewise 4 more for the
    gradient of lse), then Σ [Tp·hq(r)·D·b + Kp·hkv(r)·(D + Dv)·c]·B, where c is b, or 4 (8 for fp64) if some KV head is on
    several ranks, whose fp32 contributions are summed at the token's owner in rank order. Memory: q, k, v and out of all
    T tokens for these heads, which also are what is kept for backward.

    Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
    Models" (2023), section 3.
    """
    )

    strategy = Ulysses

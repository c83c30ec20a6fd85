"""Ulysses attention: tokens are exchanged for heads.

Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long
Sequence Transformer Models" (2023), section 3. An all-to-all gives each rank all tokens of some of
the heads; it attends over the whole packed batch; a second all-to-all brings the output back. Query
heads go to ranks as evenly as they divide, at most ⌈Hq/P⌉ each; a KV head goes to every rank that
has one of its query heads. A rank's heads are computed in groups, so that the exchanges of one
group hide under the compute of another.

On a mesh (`usp.py`) heads are exchanged within rows of `inner` ranks. Each rank then has some heads
of all of its row's tokens, and another strategy, `outer`, computes attention with them between the
rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from seqpar.arguments import as_int
from seqpar.comm.exchange import Comm
from seqpar.dtypes import accumulator_dtype
from seqpar.module import NO_OPTION
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.head_exchange import HeadExchange, call_of_heads, merged_call
from seqpar.softmax.head_groups import HeadGroups, divide_heads
from seqpar.softmax.module import Attention
from seqpar.softmax.strategy import ForwardResult, Strategy
from seqpar.strategies.registry import register
from seqpar.strategies.ring import Ring
from seqpar.traffic import Traffic


@dataclass(frozen=True)
class Ulysses(Strategy):
    """Tokens are exchanged for heads."""

    name = "ulysses"
    head_groups: int = 2  # into how many groups a rank's heads are cut, if there are so many
    # USP sets these; they are no options: ranks among which heads are exchanged (0: all), and what
    # runs between the rows.
    inner: int = field(default=0, metadata=NO_OPTION)
    outer: Strategy = field(default_factory=Ring, metadata=NO_OPTION)

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_groups", as_int("head_groups", self.head_groups, 1, 2**20))

    def merged_size(self, ranks: int) -> int:
        return self.inner or ranks

    def heads(self, ranks: int, q_heads: int, kv_heads: int) -> HeadGroups:
        """Return which heads each rank of a row has, and in which groups.

        With several rows, groups do not divide the query heads of a KV head, since the outer
        strategy would then send the KV head once for each group.
        """
        inner = self.merged_size(ranks)
        return divide_heads(inner, q_heads, kv_heads, self.head_groups, whole_kv=inner < ranks)

    def _exchange(self, comm: Comm, call: ResolvedCall, direction: str) -> HeadExchange:
        """Return the exchange of heads in a pass, within this rank's row."""
        heads = self.heads(comm.size, call.shape.heads, call.shape.kv_heads)
        size, label = self.merged_size(comm.size), f"{self.name} {direction}"
        return HeadExchange(comm, call, heads, size, label, self.outer.name)

    def forward(
        self, comm: Comm, call: ResolvedCall, q: Tensor, k: Tensor, v: Tensor
    ) -> ForwardResult:
        exchange = self._exchange(comm, call, "forward")
        rows = q.shape[1], q.shape[0], q.shape[2]
        out = q.new_empty((*rows, v.shape[3]))
        lse = q.new_full((*rows, 1), torch.nan, dtype=accumulator_dtype(q.dtype))
        targets = [out] if call.sinks is None and not call.return_lse else [out, lse]
        residuals: list[Tensor] = []
        leaving = None
        for number, (q_heads, *kv) in enumerate(exchange.arrivals([q], [k, v])):
            own = exchange.own(number)
            if own.first:
                kv_heads = kv
            operands = [q_heads, *(x[:, :, : own.kv_count] for x in kv_heads)]
            outer_call = exchange.call(own)
            out_heads, lse_heads, _ = self.outer.forward(exchange.outer, outer_call, *operands)
            residuals += [q_heads, out_heads, lse_heads, *(kv if own.first else [])]
            heads = [group.q for group in exchange.heads.group(number)]
            results = zip(targets, [out_heads, lse_heads[..., None]], strict=False)
            transfers = [exchange.queries.to_tokens(x, heads, target) for target, x in results]
            before, leaving = leaving, exchange.post(transfers, number)
            if before is not None:
                before.wait()
        assert leaving is not None
        leaving.wait()
        return ForwardResult(out.transpose(0, 1), lse[..., 0].transpose(0, 1), residuals)

    def backward(
        self,
        comm: Comm,
        call: ResolvedCall,
        dout: Tensor,
        dlse: Tensor | None,
        residuals: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        exchange = self._exchange(comm, call, "backward")
        remaining = iter(residuals)
        q, k, v = residuals[0], *residuals[3:5]
        # dk and dv of a KV head that several ranks have are summed by the tokens' owner, so they
        # are sent in the accumulator's dtype. Others are complete, and sent in q's.
        several = exchange.heads.kv_on_several_ranks
        kv_dtype = accumulator_dtype(q.dtype) if several else q.dtype
        batch, tokens, heads, _ = dout.shape
        dq = q.new_empty((tokens, batch, heads, q.shape[3]))
        kv_shape = exchange.keys.tokens, batch, call.shape.kv_heads
        dk, dv = (x.new_zeros((*kv_shape, x.shape[3]), dtype=kv_dtype) for x in (k, v))
        dlse = call.dlse_on_all_ranks(dlse, dout)
        output = [dout] if dlse is None else [dout, dlse[..., None]]
        leaving = None
        sums: list[Tensor] = []  # dk and dv of KV heads that the next group shares
        arrivals = exchange.arrivals(output, [])
        for number in range(exchange.heads.count):  # `enumerate` would keep what it has yielded
            dout_heads, *dlse_heads = next(arrivals)
            own, groups = exchange.own(number), exchange.heads.group(number)
            q, out, lse = next(remaining), next(remaining), next(remaining)
            if own.first:
                k, v = next(remaining), next(remaining)
            operands = [q, *(x[:, :, : own.kv_count] for x in (k, v)), out, lse]
            dlse_group = dlse_heads[0][..., 0] if dlse_heads else None
            dq_heads, *dkv = self.outer.backward(
                exchange.outer, exchange.call(own), dout_heads, dlse_group, operands
            )
            if sums:
                dkv = [total.add_(x) for total, x in zip(sums, dkv, strict=True)]
            sums = [] if own.last else dkv
            dq_heads = dq_heads.to(dq.dtype)
            count = own.leaving_kv.stop - own.leaving_kv.start
            complete = [x[:, :, :count].to(kv_dtype) for x in dkv]
            del dout_heads, dkv
            transfers = [exchange.queries.to_tokens(dq_heads, [group.q for group in groups], dq)]
            kv_heads = [group.leaving_kv for group in groups]
            transfers += [
                exchange.keys.to_tokens(x, kv_heads, target, add=True)
                for target, x in zip((dk, dv), complete, strict=True)
            ]
            del dq_heads, complete  # only what is sent is held while the next group is computed
            before, leaving = leaving, exchange.post(transfers, number)
            if before is not None:
                before.wait()
        assert leaving is not None
        leaving.wait()
        return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)

    def areas(self, call: ResolvedCall, rank: int) -> list[int]:
        size = self.merged_size(call.ranks)
        merged = merged_call(call, rank, size)
        groups = self.heads(call.ranks, call.shape.heads, call.shape.kv_heads).of_rank(rank % size)
        return [
            area
            for group in groups
            for area in self.outer.areas(call_of_heads(merged, group), rank // size)
        ]

    def traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        shape, size = call.shape, self.merged_size(call.ranks)
        index, first = rank % size, rank // size * size
        heads = self.heads(call.ranks, shape.heads, shape.kv_heads)
        element, accumulator = shape.dtype.itemsize, accumulator_dtype(shape.dtype).itemsize
        returned = accumulator if heads.kv_on_several_ranks else element
        lse_returns = call.return_lse or call.sinks is not None
        rows: list[Traffic] = []

        def send(direction: str, step: int, peer: int, tokens: int, heads: int, size: int) -> None:
            total = tokens * shape.batch * heads * size
            rows.append(Traffic(direction, step, first + peer, 1, total))

        for step in range(heads.count):
            groups = heads.group(step)
            own = groups[index]
            leaving_kv = own.leaving_kv.stop - own.leaving_kv.start
            for peer, group in enumerate(groups):
                if peer == index:
                    continue
                tokens, kv_tokens = (x.holdings[rank].tokens for x in (call.layout, call.kv_layout))
                peer_tokens, peer_kv_tokens = (
                    x.holdings[first + peer].tokens for x in (call.layout, call.kv_layout)
                )
                arriving_kv = group.arriving_kv.stop - group.arriving_kv.start
                send("forward", step, peer, tokens, group.q_count, shape.dim * element)
                for dim in (shape.dim, shape.value_dim):
                    send("forward", step, peer, kv_tokens, arriving_kv, dim * element)
                    send("backward", step, peer, peer_kv_tokens, leaving_kv, dim * returned)
                send("forward", step, peer, peer_tokens, own.q_count, shape.value_dim * element)
                send("forward", step, peer, peer_tokens, own.q_count, lse_returns * accumulator)
                send("backward", step, peer, tokens, group.q_count, shape.value_dim * element)
                send("backward", step, peer, tokens, group.q_count, call.return_lse * accumulator)
                send("backward", step, peer, peer_tokens, own.q_count, shape.dim * element)
        merged = merged_call(call, rank, size)
        for group in heads.of_rank(index):
            outer = self.outer.traffic(call_of_heads(merged, group), rank // size)
            rows += [row._replace(peer=row.peer * size + index) for row in outer]
        return rows

    def empty_residuals(
        self, comm: Comm, q: Tensor, k: Tensor, v: Tensor, tokens: int, kv_tokens: int
    ) -> list[Tensor]:
        size, batch = self.merged_size(comm.size), q.shape[0]
        heads = self.heads(comm.size, int(q.shape[2]), int(k.shape[2]))
        residuals = []
        for group in heads.of_rank(comm.rank % size):
            rows, keys = (batch, tokens, group.q_count), (batch, kv_tokens, group.kv_count)
            residuals += [q.new_empty((*rows, q.shape[3])), q.new_empty((*rows, v.shape[3]))]
            residuals += [q.new_empty(rows, dtype=accumulator_dtype(q.dtype))]
            residuals += [x.new_empty((*keys, x.shape[3])) for x in (k, v) if group.first]
        return residuals


@register
class UlyssesAttention(Attention):
    """Softmax attention that exchanges tokens for heads.

    An all-to-all of q, k and v comes before the attention, and one of its output after it. A rank's
    heads are computed in `head_groups` groups (default 2), so that the exchanges of one hide under
    the compute of another. See `Attention` for the call, which all strategies share.

    A rank computes at most ⌈Hq/P⌉ query heads over the whole pack, whatever the layout. The number
    of ranks need not divide the number of query heads, and there may be fewer KV heads than ranks;
    a KV head is sent to each rank that needs it.

    Bytes sent by rank r, which has Tr query tokens and Kr key tokens, with hq(p) and hkv(p) the
    numbers of heads of rank p and b the bytes of an element. Sums are over the other ranks p:

    * forward: Σ [Tr·hq(p)·D + Kr·hkv(p)·(D + Dv)]·B·b, then Σ Tp·hq(r)·(Dv·b)·B, and with
      `return_lse` or sinks 4 (8 for fp64) more for each token and head;
    * backward: Σ Tr·hq(p)·Dv·B·b (likewise 4 more for the gradient of lse), then
      Σ [Tp·hq(r)·D·b + Kp·hkv(r)·(D + Dv)·c]·B, where c is b, or 4 (8 for fp64) if some KV head is
      on several ranks, whose fp32 contributions the token's owner sums in rank order.

    `traffic` says how many that is. Memory: q, k, v and out of all T tokens for this rank's heads,
    which are also kept for backward.

    Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long
    Sequence Transformer Models" (2023), section 3.
    """

    strategy = Ulysses

"""Ulysses attention: each rank computes some of the heads for all tokens.

An exchange before the attention gives each rank the q, k and v of its heads, for all tokens. An
exchange after the attention returns the outputs to the ranks that hold the tokens. The loop
`ulysses` of docs/internals/in_300_lines.md shows the idea. Unlike the loop, this strategy accepts
any number of heads. A KV head is sent to every rank that computes one of its query heads. Heads are
computed in groups, and the computation of one group hides the messages of another group.

USP (`usp.py`) uses the same code on a mesh. In USP, the ranks of a mesh row exchange heads, and a
second strategy computes the attention of these heads across rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from seqpar.attention.module import NO_OPTION
from seqpar.comm.messages.comm import Comm
from seqpar.core.arguments import as_int, shown
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.traffic import Traffic
from seqpar.softmax.call import Operands, ResolvedCall
from seqpar.softmax.compute.partial import OutputGradient
from seqpar.softmax.heads.head_exchange import (
    HeadExchange,
    HeadGroups,
    HeadPlan,
    Tensors,
    call_of_heads,
    divide_heads,
    in_heads,
    merged_call,
)
from seqpar.softmax.module import Attention
from seqpar.softmax.strategy import ForwardResult, Gradients, Strategy
from seqpar.strategies.registry import register
from seqpar.strategies.ring import Ring


@dataclass(frozen=True)
class Ulysses(Strategy):
    name = "ulysses"
    head_groups: int = 2  # the number of groups of a rank's heads, at most one per head
    # What forward keeps for backward: q, k, v and out of this rank's "heads" or of its "tokens".
    # With "heads", the exchanged tensors are additional results of the forward operator, and are
    # kept instead of the local q, k, v and out, so that backward does not send q, k and v again.
    # Instead of out, delta could be kept. But some kernels require out, and making a substitute for
    # out from dout and delta in fp32 takes more memory than keeping out. With "tokens", delta is
    # sent and not out, because out is as large as dout.
    keep: str = "heads"
    # USP sets these two: the number of ranks that exchange heads (0 means all ranks), and the
    # strategy between rows.
    inner: int = field(default=0, metadata=NO_OPTION)
    outer: Strategy = field(default_factory=Ring, metadata=NO_OPTION)

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_groups", as_int("head_groups", self.head_groups, 1, 2**20))
        if not isinstance(self.keep, str) or self.keep not in ("heads", "tokens"):
            raise ValueError(f'keep must be "heads" or "tokens", got {shown(self.keep)}')

    @property
    def takes_most_documents(self) -> bool:
        return self.outer.takes_most_documents

    def to_rank_invariant(self) -> Self:
        if self.keep != "heads":
            raise ValueError('keep must be "heads" with deterministic="ranks", got "tokens"')
        return replace(self, rank_invariant=True, outer=self.outer.to_rank_invariant())

    def merged_size(self, ranks: int) -> int:
        return self.inner or ranks

    def heads(self, ranks: int, q_heads: int, kv_heads: int) -> HeadGroups:
        """Return the heads that each rank of a mesh row computes, divided into groups.

        If the mesh has several rows, all query heads of a KV head are in one group. With
        `deterministic="ranks"`, all query heads of a KV head are on one rank.
        """
        inner, whole = self.merged_size(ranks), self.rank_invariant
        divided = inner, q_heads, kv_heads, self.head_groups
        return divide_heads(*divided, whole_kv=inner < ranks or whole, whole_on_ranks=whole)

    def plan(self, call: ResolvedCall, rank: int, direction: str) -> HeadPlan:
        operands, kept = ["q", "k", "v"], list[str]()
        # The rank that holds a token needs the token's lse in two cases: if it keeps tokens for
        # backward, and if there are sinks, which it adds to the denominator.
        lse = call.return_lse or call.has_sinks or self.keep == "tokens"
        arriving, leaving = operands, ["out", "lse"] if lse else ["out"]
        if direction == "backward":
            arriving, leaving = ["dout"], ["dq", "dk", "dv"]
            if self.keep == "tokens":
                arriving = [*operands, "dout", "lse", "delta"]
            else:
                kept = operands
            if call.return_lse:
                arriving = [*arriving, "dlse"]
        heads = self.heads(call.ranks, call.shape.heads, call.shape.kv_heads)
        return HeadPlan(call, rank, heads, self.merged_size(call.ranks), arriving, leaving, kept)

    def _exchange(
        self, comm: Comm, call: ResolvedCall, direction: str, make_results: Callable[[], Tensors]
    ) -> tuple[HeadPlan, HeadExchange]:
        """Return the plan of one pass, which is made once per layout, and the exchange of heads.

        `direction` is "forward" or "backward".
        """
        key = ("heads", self, direction, call.return_lse, call.has_sinks)
        plan = call.once(key, lambda: self.plan(call, comm.rank, direction))
        label = f"{self.name} {direction}"
        return plan, HeadExchange(comm, plan, label, self.outer.name, make_results)

    def check(self, call: ResolvedCall) -> None:
        size = self.merged_size(call.ranks)
        outer = lambda: self.outer.check(merged_call(call, call.rank, size))  # noqa: E731
        call.once(("outer checked", self), outer)

    def forward(self, comm: Comm, call: ResolvedCall, operands: Operands) -> ForwardResult:
        q, k, v, sinks = operands

        def make_results() -> Tensors:
            lse = q.new_full(q.shape[:-1], torch.nan, dtype=accumulator_dtype(q.dtype))
            return {"out": q.new_empty((*q.shape[:-1], v.shape[-1])), "lse": lse}

        plan, exchange = self._exchange(comm, call, "forward", make_results)
        arrivals, residuals = exchange.arrivals({"q": q, "k": k, "v": v}), list[Tensor]()
        kv: list[Tensor] = []
        for group in plan.groups:
            merged = next(arrivals)
            heads = in_heads(group.arriving, merged)
            kv = group.keys(heads, kv)
            own_call = group.call.with_heads_of(call, group.own.q)
            own = Operands(heads["q"], kv[0], kv[1], group.sinks(sinks))
            out, lse, _ = self.outer.forward(exchange.outer, own_call, own)
            if self.keep == "heads":
                residuals += [*merged, out, lse]
            results = {"out": out, "lse": lse}
            del merged, heads, own, out, lse
            if group.own.last:
                kv = []
            exchange.send_back(results)
        results = exchange.results()
        return ForwardResult(results["out"], results["lse"], residuals)

    def backward(
        self,
        comm: Comm,
        call: ResolvedCall,
        dout: Tensor,
        dlse: Tensor | None,
        sinks: Tensor | None,
        residuals: list[Tensor],
    ) -> Gradients:
        dlse = call.dlse_on_all_ranks(dlse, dout)
        local = {"dout": dout}
        if self.keep == "tokens":
            q, k, v, out, lse = residuals
            output = OutputGradient.of(dout, dlse, out, lse, sinks)
            local = {"q": q, "k": k, "v": v, "dout": output.dout}
            local |= {"lse": output.lse, "delta": output.ensure_delta()}
            residuals = []
        if dlse is not None:
            local["dlse"] = dlse

        def make_results() -> Tensors:
            shape = call.shape
            make = dout.new_zeros if plan.adds_kv else dout.new_empty
            kv = shape.batch, plan.kv_tokens, shape.kv_heads
            return {
                "dq": dout.new_empty((*dout.shape[:-1], shape.dim)),
                "dk": make((*kv, shape.dim), dtype=plan.kv_dtype),
                "dv": make((*kv, shape.value_dim), dtype=plan.kv_dtype),
            }

        plan, exchange = self._exchange(comm, call, "backward", make_results)
        arrivals, remaining = exchange.arrivals(local), iter(residuals)
        kv: list[Tensor] = []
        sums: Tensors = {}  # dk and dv of KV heads that this group shares with the next group
        for group in plan.groups:
            heads = in_heads(group.arriving, next(arrivals))
            own_call = group.call.with_heads_of(call, group.own.q)
            own_sinks = group.sinks(sinks)
            if self.keep == "tokens":
                output = OutputGradient(
                    heads["dout"], None, heads["lse"], heads.get("dlse"), heads["delta"]
                )
            else:
                heads |= in_heads(group.kept, [next(remaining) for _ in group.kept])
                out, lse = next(remaining), next(remaining)
                output = OutputGradient.of(
                    heads["dout"], heads.get("dlse"), out, lse, own_sinks, self.rank_invariant
                )
                del out, lse
            kv = group.keys(heads, kv)
            own = Operands(heads["q"], kv[0], kv[1], own_sinks)
            computed = self.outer.gradients(exchange.outer, own_call, output, own)
            gradients = dict(zip(("dq", "dk", "dv"), computed, strict=True))
            del heads, own, output, computed
            gradients |= {name: total.add_(gradients[name]) for name, total in sums.items()}
            sums = {}
            if group.own.last:
                kv = []
            else:  # The next group has the same KV heads, so dk and dv are not complete yet.
                # kernels may return results in a different dtype
                exact = accumulator_dtype(dout.dtype)
                sums = {name: gradients[name].to(exact) for name in ("dk", "dv")}
            exchange.send_back(gradients)
        results = exchange.results()
        return results["dq"], results["dk"], results["dv"]

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
        rows: list[Traffic] = []
        for direction in ("forward", "backward"):
            plan = self.plan(call, rank, direction)
            for step, group in enumerate(plan.groups):
                sizes = [(block, block.token_sizes) for block in group.arriving]
                sizes += [(block, block.head_sizes) for block in group.leaving]
                rows += [
                    Traffic(direction, step, peer, 1, elements[number] * block.dtype.itemsize)
                    for block, elements in sizes
                    for number, peer in block.others
                ]
        size = len(plan.row)
        for group in plan.groups:
            own_call = group.call.with_heads_of(call, group.own.q)
            outer = self.outer.traffic(own_call, rank // size)
            rows += [row._replace(peer=plan.column[row.peer]) for row in outer]
        return rows

    def empty_residuals(
        self, comm: Comm, q: Tensor, k: Tensor, v: Tensor, tokens: int, kv_tokens: int
    ) -> list[Tensor]:
        if self.keep == "tokens":
            return []
        size, batch = self.merged_size(comm.size), q.shape[0]
        heads = self.heads(comm.size, int(q.shape[2]), int(k.shape[2]))
        residuals = []
        for group in heads.of_rank(comm.rank % size):
            arriving_kv = group.arriving_kv.stop - group.arriving_kv.start
            elements = tokens * group.q_count * q.shape[3]
            elements += kv_tokens * arriving_kv * (k.shape[3] + v.shape[3])
            rows = batch, tokens, group.q_count
            residuals += [q.new_empty(batch * elements), q.new_empty((*rows, v.shape[3]))]
            residuals += [q.new_empty(rows, dtype=accumulator_dtype(q.dtype))]
        return residuals


@register
class UlyssesAttention(Attention):
    """Softmax attention in which ranks exchange tokens for heads.

    Before the attention, an all-to-all exchanges q, k and v, so that each rank has some heads of
    all tokens. After the attention, a second all-to-all returns the output. A rank computes at most
    ⌈Hq/P⌉ query heads, in any layout. The numbers of heads need not be multiples of the number of
    ranks, because a KV head is sent to each rank that needs it. See `Attention` for the call, which
    all strategies share.

    Args:
        head_groups: the number of groups in which a rank computes its heads, 2 by default. The
            computation of one group hides the messages of another group.
        keep: which tensors forward keeps for backward, "heads" (the default) or "tokens" (see
            Memory below).

    Bytes sent by rank r, which has Tr query tokens and Kr key tokens. hq(p) and hkv(p) are the
    numbers of query heads and KV heads of rank p. b is the number of bytes of an element, and e is
    4 (8 for fp64). Sums are over the other ranks p. `traffic` returns these numbers.

    * forward: Σ [Tr·hq(p)·D + Kr·hkv(p)·(D + Dv)]·B·b for q, k and v, then Σ Tp·hq(r)·Dv·B·b for
      out. With `return_lse`, sinks or `keep="tokens"`, lse is sent with out, with e bytes per token
      and head;
    * backward: Σ Tr·hq(p)·Dv·B·b for dout, then Σ [Tp·hq(r)·D·b + Kp·hkv(r)·(D + Dv)·c]·B for dq,
      dk and dv. If lse has a gradient, it is sent with dout, with e bytes per token and head. c is
      b, or e if several ranks compute with a KV head. In the second case, the rank that holds the
      token adds their contributions in rank order;
    * backward with `keep="tokens"` in addition: q, k and v again, Σ [Tr·hq(p)·D + Kr·hkv(p)·(D +
      Dv)]·B·b, and lse and delta = out·dout − dlse, Σ Tr·hq(p)·2e·B.

    Messages: for each group of heads, a rank sends one message to each other rank for all tensors
    with the same tokens and dtype. In forward, the first message has q, k and v, and the second
    message has out. In backward, the first message has dout, and the second message has dq, dk and
    dv.

    Memory: with `keep="heads"`, forward keeps q, k, v, out and lse of all T tokens for this rank's
    heads, instead of the local tensors. They have [T·hq·(D + Dv) + T·hkv·(D + Dv)]·B·b + T·hq·B·e
    bytes. With `keep="tokens"`, forward keeps the local q, k, v, out and lse like other strategies,
    and backward exchanges heads again. A rank then holds at most two groups at a time: the group
    that is being computed, and the next group, which arrives. The rank also holds the messages of
    the preceding group and of the next group. For example, with 64 heads on 8 ranks in 8 groups,
    computation takes 1/8 of the memory for all heads together. k and v of a KV head are held until
    the last group with query heads of this KV head is computed.

    The method is from Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training
    of Extreme Long Sequence Transformer Models" (2023), section 3. `keep="tokens"` is from Ghadia
    et al., "Untied Ulysses: Memory-Efficient Context Parallelism via Headwise Chunking" (2026).
    """

    strategy = Ulysses

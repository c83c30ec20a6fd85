"""The module of softmax attention: what all strategies' modules share."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

import numpy as np
from torch import Tensor

import seqpar.softmax.flops  # noqa: F401  tells torch how many FLOPs the operators take
from seqpar.attention.module import BoundModule, make_strategy
from seqpar.attention.operands import fold_scale, prepare_operands
from seqpar.comm.dtensor import HeadPlacement, local_heads
from seqpar.comm.messages.exchange import Group
from seqpar.comm.routing.routing import Routing
from seqpar.core.arguments import (
    CuSeqlens,
    Deterministic,
    Ints,
    WindowSize,
    as_bool,
    as_deterministic,
    check_tensor,
)
from seqpar.core.compiling import outside_graphs
from seqpar.core.traffic import Traffic
from seqpar.layout.layout import Layout
from seqpar.layout.masks.mask import Mask
from seqpar.softmax.call import (
    ArgumentKeywords,
    CallArguments,
    CallKeywords,
    Causal,
    DecodeKeywords,
    Operands,
    ResolvedCall,
)
from seqpar.softmax.compute.max_logits import max_logits_traffic
from seqpar.softmax.decode import attend_to_cache, layout_of_queries, refuse_gradients
from seqpar.softmax.operator import as_result, attention_op
from seqpar.softmax.resolution import resolve
from seqpar.softmax.strategy import Strategy

OperatorInputs = tuple[Operands, CallArguments, HeadPlacement]
COMMON_OPTIONS = ("check_ranks", "deterministic", "routing")  # of all strategies' modules


class Attention(BoundModule[Strategy]):
    """Softmax attention over a packed batch whose tokens are spread over the ranks of a group.

    All subclasses take the same call and give the same answer, forward and backward, on any layout;
    they differ in what they send.

    Args:
        group: a process group or a 1-D DeviceMesh.
        check_ranks: compare a digest of each call over the ranks first (32 bytes to each peer), so
            that ranks that disagree all raise the same ValueError instead of hanging.
        deterministic: promise the same bits for the same call; on CPU that holds either way. With
            "ranks": on any number of ranks, in any layout, by all strategies that take it
            (docs/internals/numerics.md), of out, lse, dq, dk and dv.
        routing: how messages between nodes are sent over several NICs at once; None: straight.
        options: the strategy's options.
    """

    strategy: ClassVar[type[Strategy]]
    dimensions: ClassVar[int] = 1  # of the group or mesh

    def __init__(
        self,
        group: Group,
        check_ranks: bool = False,
        deterministic: Deterministic = True,
        *,
        routing: Routing | None = None,
        **options: Any,
    ) -> None:
        if type(self) is Attention:
            raise TypeError("Attention has no strategy: use make_attention(name, group)")
        strategy = make_strategy(self.strategy, options, COMMON_OPTIONS)
        self._bind(strategy, group, check_ranks, deterministic, routing)

    def _bind(
        self,
        strategy: Strategy,
        group: Group,
        check_ranks: bool,
        deterministic: Deterministic,
        routing: Routing | None = None,
    ) -> None:
        self.deterministic = as_deterministic(deterministic)
        if self.deterministic == "ranks":
            strategy = strategy.anchor()
        super().__init__(strategy, group, self.dimensions, check_ranks, routing)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        *,
        causal: Causal = ...,
        kv_layout: Layout | None = None,
        prefix_lens: CuSeqlens | None = None,
        window_size: WindowSize = (-1, -1),
        mask: Mask | None = None,
        softmax_scale: float | Tensor | None = None,
        softcap: float | None = 0.0,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        return_max_logits: bool = False,
        dropout_p: float = 0.0,
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute attention of this rank's queries over the keys of all ranks, within documents.

        The gradients are those of the sum of all ranks' losses. Under autocast q, k and v are cast
        as SDPA's are.

        Args:
            q: (T_local, Hq, D) or (B, T_local, Hq, D), in the layout's local order; fp64, fp32,
                bf16 or fp16. If it is a DTensor, all tensors are, with at most their heads sharded,
                evenly, over one mesh; so are the results.
            k: (Tkv_local, Hkv, D) or with the batch in front; Hq must be a multiple of Hkv.
            v: (Tkv_local, Hkv, Dv), likewise.
            layout: which tokens of the packed batch each rank holds.
            causal: whether a query sees no key behind its own position. It has no default, but is
                left out (or False) where there is a `mask`.
            kv_layout: the layout of k and v, where they are other tokens than q (cross attention,
                chunked prefill): the same documents and ranks, ends aligned as in flash-attn.
                Default: `layout`.
            prefix_lens: (documents,) ints. All queries of document i also see its first
                `prefix_lens[i]` keys.
            window_size: (left, right), as in flash-attn: how many keys before and behind its own
                position a query sees; −1 and None are unlimited, and `causal` cuts right at 0.
                None: no window.
            mask: who sees whom as a list of ranges (`seqpar.Mask.of_ranges`), in place of `causal`,
                `window_size` and `prefix_lens`. A query that sees no key has out 0.
            softmax_scale: what q·k is multiplied by, of any sign. Default: 1/√D. A tensor () that
                requires a gradient, or (Hq,), one scale a head, multiplies q, and the product is
                rounded to q's dtype: in half precision out's RMS error becomes 1.3 to 2 times that
                of a number. Its gradient is summed over this rank's queries.
            softcap: c > 0 turns a score s into c·tanh(s/c), as in Gemma 2; 0 and None: no cap.
                From 1e30 on it caps nothing; it has no gradient.
            alibi_slopes: (Hq,) or (B, Hq), fp32 or fp64, the same on all ranks. As in flash-attn,
                slope·|i + Lkv − Lq − j|, of positions in a document of Lq queries and Lkv keys, is
                subtracted from a score behind the softcap. No gradient; not on a `ServerPool`.
            sinks: (Hq,), a learnable logit for each head that joins the softmax's denominator, as
                in GPT-OSS; −∞ is no sink, and +∞ leaves nothing to the keys. Its gradient is summed
                over this rank's queries.
            return_lse: also return the natural-log lse of the keys alone, without the sinks.
            return_max_logits: also return the largest score of each head, as QK-clip needs it: of
                scale·q·k alone, over all pairs that see each other, on all ranks and in the whole
                batch. Scores are computed once more for it, in plain PyTorch, and each rank sends
                4·Hq bytes (8 for fp64) to each other one. Not on a `ServerPool`.
            dropout_p: must be 0; dropout over sharded keys is not offered.

        Returns:
            out (T_local, Hq, Dv), or with the batch in front, in q's dtype; or (out, lse), both
            differentiable, with lse (T_local, Hq) or (B, T_local, Hq) in fp32 (fp64 for fp64). A
            row that sees no key has out 0 and lse −inf. With `return_max_logits` there is behind
            them (Hq,) of lse's dtype, without a gradient and the same on all ranks; −inf of a head
            without pairs.

        Raises:
            ValueError: if the call is wrong or cannot be computed exactly. It names the argument,
                and is raised before anything is sent.
        """
        operands, arguments, heads = self._inputs(
            q,
            k,
            v,
            layout,
            causal=causal,
            kv_layout=kv_layout,
            prefix_lens=prefix_lens,
            window_size=window_size,
            mask=mask,
            softmax_scale=softmax_scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            return_lse=return_lse,
            return_max_logits=return_max_logits,
            dropout_p=dropout_p,
        )
        out, lse, _, *more = attention_op(operands, arguments)
        return as_result(out, lse, arguments, heads, q.dim() == 3, *more[:1])

    def _messages(self, call: Any, rank: int, options: dict[str, object]) -> list[Traffic]:
        rows = super()._messages(call, rank, options)
        if options.get("return_max_logits", False):
            rows = [*rows, *max_logits_traffic(call.shape, rank, self.ranks)]
        return rows

    @outside_graphs
    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_layout: Layout,
        *,
        cu_seqlens: CuSeqlens | None = None,
        causal: Causal = ...,
        softmax_scale: float | Tensor | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        **options: Unpack[DecodeKeywords],
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute attention of queries that all ranks have, over keys that stay where they are.

        Each rank attends to the keys that it has, and the partials of all ranks, (out, lse), are
        gathered in one exchange and merged: B·T·Hq·(Dv + 1)·4 bytes (8 an element for fp64) from
        each rank to each other one, however many keys there are. All ranks return the same bits.
        Strategies do not differ in it. There are no gradients.

        Shyam et al., "Tree Attention: Topology-aware Decoding for Long-Context Attention on GPU
        Clusters" (2024), which reduces the partials instead: two exchanges more, of less.

        Args:
            q: (T, Hq, D) or (B, T, Hq, D), the same on all ranks: the last tokens of each document.
            k_cache: (Tkv_local, Hkv, D), or with the batch in front, this rank's keys in the
                layout's local order, those of the new tokens among them.
            v_cache: (Tkv_local, Hkv, Dv), likewise.
            kv_layout: which of the keys, of all documents, each rank has.
            cu_seqlens: how the tokens of q are cut into documents. Default: equally.
            causal: whether a query sees no key behind its own position. Default: True, unless
                there is a `mask`.
            softmax_scale: as in a call.
            sinks: as in a call.
            return_lse: also return the natural-log lse of the keys alone, without the sinks.
            options: `prefix_lens`, `window_size`, `softcap`, `alibi_slopes` and `mask`, as in a
                call; positions of queries in a mask count among those of q.

        Returns:
            out (T, Hq, Dv), or with the batch in front, in q's dtype; or (out, lse), with lse
            (T, Hq) or (B, T, Hq) in fp32 (fp64 for fp64).

        Raises:
            ValueError: if the call is wrong, or a tensor requires a gradient. It names the
                argument, and is raised before anything is sent.
        """
        with self.agreeing():
            if as_bool("return_max_logits", options.get("return_max_logits", False)):
                raise ValueError("return_max_logits must be False: decode does not compute them")
            if self._bound.strategy.anchored:
                raise ValueError('deterministic must be True or False for decode, got "ranks"')
            tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "sinks": sinks}
            refuse_gradients(**tensors, softmax_scale=softmax_scale)
            layout = layout_of_queries(self._bound.comm, q, k_cache, cu_seqlens, kv_layout)
        if causal is ... and options.get("mask") is None:
            causal = True
        operands, arguments, heads = self._inputs(
            q,
            k_cache,
            v_cache,
            layout,
            causal=causal,
            kv_layout=kv_layout,
            softmax_scale=softmax_scale,
            sinks=sinks,
            return_lse=return_lse,
            **options,
        )
        out, lse = attend_to_cache(self._bound, arguments, operands)
        return as_result(out, lse, arguments, heads, q.dim() == 3)

    def mask_area(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Unpack[CallKeywords]
    ) -> Ints:
        """Return (ranks, steps): the area that each rank computes in each step.

        An area is the number of (query, key) pairs that see each other, times query heads. The
        arguments are those of a call; of the tensors just the shapes matter. It computes and sends
        nothing, and returns the same on all ranks. Steps in which no rank has work are included.
        Where ranks wait for each other in each step, `area.max(0) / area.mean(0)` is how much
        longer each step takes than with work spread evenly.
        """
        call = self._resolve(q, k, v, layout, **options)
        steps = [self._bound.strategy.areas(call, rank) for rank in range(self.ranks)]
        return np.array(steps, dtype=np.int64)

    def _inputs(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Unpack[CallKeywords]
    ) -> OperatorInputs:
        """Return `_operator_inputs`; raise their fault on all ranks, if these check their calls.

        On meta tensors the operator runs its fake rule, which finds no fault, so they are resolved
        here.
        """
        try:
            inputs = self._operator_inputs(q, k, v, layout, **options)
        except (ValueError, TypeError) as fault:
            self._refuse(fault, q)
        if inputs[0].q.is_meta:
            self._to_call(inputs[0], inputs[1])
        return inputs

    def _operator_inputs(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        *,
        sinks: Tensor | None = None,
        **options: Unpack[ArgumentKeywords],
    ) -> OperatorInputs:
        """Return the operands, the operator's other arguments, and how heads lie on a mesh."""
        tensors = {
            "q": (q, -2),
            "k": (k, -2),
            "v": (v, -2),
            "sinks": (sinks, 0),
            "softmax_scale": (options.get("softmax_scale"), 0),
            "alibi_slopes": (options.get("alibi_slopes"), -1),
        }
        (q, k, v, sinks, scale, slopes), heads = local_heads(tensors)
        check_tensor("q", q)
        q, scale = fold_scale("softmax_scale", q, scale)
        q, k, v = prepare_operands(q, k, v, sinks=sinks, alibi_slopes=slopes)
        options["softmax_scale"], options["alibi_slopes"] = scale, slopes
        size = self._bound.strategy.merged_size(self.ranks)
        first = self.rank // size * size
        merged, deterministic = slice(first, first + size), bool(self.deterministic)
        arguments = CallArguments.of(
            self._key, q.shape[-1], layout, merged, deterministic=deterministic, **options
        )
        return Operands(q, k, v, sinks), arguments, heads

    def _to_call(self, operands: Operands, arguments: CallArguments) -> ResolvedCall:
        return resolve(self._bound, arguments, operands)

"""`Attention`, the base class of the modules of all strategies of softmax attention."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Never

import numpy as np
import torch
from torch import Tensor

from seqpar.attention.backend import current_backend
from seqpar.attention.module import BoundModule, make_strategy
from seqpar.attention.operands import fold_scale, prepare_operands
from seqpar.attention.rehearsal import Preparation
from seqpar.attention.unknown_arguments import call_arguments, unknown_argument
from seqpar.comm.dtensor import HeadPlacement, local_heads
from seqpar.comm.messages.comm import Comm, Group
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
from seqpar.softmax.call import CallArguments, Causal, Operands, ResolvedCall
from seqpar.softmax.compute.max_logits import MaxLogits, max_logits_traffic
from seqpar.softmax.decode import attend_to_cache, layout_of_queries, on_all_ranks, refuse_gradients
from seqpar.softmax.softmax_operator import ATTENTION, as_result, check_most_documents
from seqpar.softmax.strategy import Strategy

OperatorInputs = tuple[Operands, CallArguments, HeadPlacement]
# the constructor's arguments that every strategy has
COMMON_OPTIONS = ("check_ranks", "deterministic", "routing")


@dataclass(frozen=True, kw_only=True)
class SoftmaxPreparation(Preparation):
    strategy: Strategy
    options: dict[str, Any]  # the other keyword arguments of the call
    deterministic: bool
    has_sinks: bool
    has_slopes: bool

    def _call(self, comm: Comm, layout: Layout) -> ResolvedCall:
        strategy, shape = self.strategy, self.shape
        size = strategy.merged_size(self.ranks)
        first = self.rank // size * size
        # the values have no effect on tables
        slopes = torch.zeros(shape.heads) if self.has_slopes else None
        user = {**self.options, "alibi_slopes": slopes}
        arguments = CallArguments.of(
            "", layout, shape.dim, slice(first, first + size), self.deterministic, user
        )
        options = arguments.options._replace(backend=self.backend)
        arguments = arguments._replace(options=options)
        call = arguments.to_call(comm, shape, self.has_sinks, self.device)
        if layout.geometry.cut.most_documents:
            check_most_documents(strategy, arguments.return_max_logits, self.is_routed)
        strategy.check(call)
        if arguments.return_max_logits:
            call = replace(call, max_logits=MaxLogits(torch.empty(shape.heads)))
        return call


class Attention(BoundModule[Strategy]):
    """Softmax attention over a packed batch whose tokens are distributed over the ranks of a group.

    All subclasses take the same arguments and compute the same result, forward and backward, on any
    layout. They differ in which tensors ranks send to each other.

    Args:
        group: a process group or a 1-D DeviceMesh. All ranks must make the calls on a group in the
            same order. If several threads call at the same time, each needs a separate group.
        check_ranks: whether to compare a digest of each call between ranks first, in ⌈log₂ P⌉
            messages of 64 bytes. If ranks make different calls, all ranks then raise the same
            ValueError, and no rank hangs.
        deterministic: with True, the same call returns the same bits in each run. On CPUs, calls
            with False also do this. With "ranks", out, lse, dq, dk and dv have the same bits on any
            number of ranks, in any layout, and with every strategy that supports "ranks"
            (docs/internals/numerics.md).
        routing: how to send messages between nodes over several NICs at the same time. With None,
            messages are sent directly.
        options: the strategy's options.
    """

    strategy: ClassVar[type[Strategy]]
    dimensions: ClassVar[int] = 1  # the number of dimensions of the group or mesh

    def __init__(
        self,
        group: Group,
        check_ranks: bool = False,
        deterministic: Deterministic = True,
        *,
        routing: Routing | None = None,
        **options: object,
    ) -> None:
        if type(self) is Attention:
            raise TypeError("Attention has no strategy: use make_attention(name, group)")
        strategy = make_strategy(self.strategy, options, COMMON_OPTIONS, self.forward)
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
            strategy = strategy.to_rank_invariant()
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
        **others: Never,
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute attention of this rank's queries over the keys of all ranks, within documents.

        Gradients are derivatives of the sum of the losses of all ranks. Autocast casts q, k and v
        as for SDPA.

        Args:
            q: (T_local, Hq, D) or (B, T_local, Hq, D), in the layout's local order; fp64, fp32,
                bf16 or fp16. If q is a DTensor, all tensors must be DTensors on the same mesh. They
                may be sharded only along heads, with equal numbers of heads on all ranks. The
                results are DTensors if q is a DTensor.
            k: (Tkv_local, Hkv, D), with a leading batch dimension if q has one. Hq must be a
                multiple of Hkv.
            v: (Tkv_local, Hkv, Dv), with a leading batch dimension if q has one.
            layout: the tokens of the packed batch that each rank holds.
            causal: whether queries only attend to keys at or before their own position. It must be
                given, unless there is a `mask`. With a `mask`, leave it out or pass False.
            kv_layout: the layout of k and v if they are other tokens than q (cross attention,
                chunked prefill). It must have the same documents and ranks. The last query and the
                last key of a document are aligned, as in flash-attn. Default: `layout`.
            prefix_lens: (documents,) ints. All queries of document i also attend to its first
                `prefix_lens[i]` keys.
            window_size: (left, right), as in flash-attn. A query attends to at most `left` keys
                before its own position, and to at most `right` keys after it. −1 and None are
                unlimited. With `causal`, right is 0. If the whole argument is None, there is no
                window.
            mask: the allowed pairs as a list of ranges (`seqpar.Mask.of_ranges`), instead of
                `causal`, `window_size` and `prefix_lens`. A query without keys has out 0.
            softmax_scale: the factor of q·k, of any sign. Default: 1/√D. A tensor () that requires
                a gradient, or a tensor (Hq,) with one scale per head, is multiplied with q, and the
                product is rounded to q's dtype. In half precision, out's RMS error is then 1.3 to 2
                times the error with a number. Its gradient is summed over this rank's queries.
            softcap: c > 0 turns a score s into c·tanh(s/c), as in Gemma 2. 0, None, and 1e30 or
                more have no effect. It has no gradient.
            alibi_slopes: (Hq,) or (B, Hq), fp32 or fp64, the same on all ranks. As in flash-attn,
                slope·|i + Lkv − Lq − j| is subtracted from a score after the softcap, for positions
                i and j in a document of Lq queries and Lkv keys. Slopes have no gradient, and
                cannot be used on a `ServerPool`.
            sinks: (Hq,), a learnable logit per head that is added to the softmax's denominator, as
                in GPT-OSS. −∞ means no sink. With +∞, out is 0. The gradient is summed over this
                rank's queries.
            return_lse: whether to return the natural-log lse of the keys, without the sinks.
            return_max_logits: whether to return the largest score of each head, for QK-clip. It is
                the largest scale·q·k over all allowed pairs, on all ranks and in the whole batch,
                without softcap or slopes. Scores are computed a second time for it, in plain
                PyTorch, and each rank sends 4·Hq bytes (8·Hq for fp64) to each other rank. It
                cannot be used on a `ServerPool`.
            dropout_p: must be 0. Dropout over sharded keys is not offered.
            others: refused. For argument names of SDPA, flash-attn and transformers, the TypeError
                names the argument to use instead.

        Returns:
            out (T_local, Hq, Dv), with a leading batch dimension if q has one, in q's dtype. With
            `return_lse`, the result is (out, lse), where lse is (T_local, Hq) or (B, T_local, Hq)
            in fp32 (fp64 for fp64). Both out and lse are differentiable. A row without keys has out
            0 and lse −inf. With `return_max_logits`, the last result is (Hq,) in lse's dtype,
            without a gradient and the same on all ranks. It is −inf for a head without pairs.

        Raises:
            ValueError: if the call is wrong or cannot be computed exactly. The error names the
                argument, and is raised before anything is sent.
        """
        if others:
            self._refuse_others(others, q, k, v)
        operands, arguments, heads = self._agreed_inputs(
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
        return as_result(ATTENTION(operands, arguments), arguments, heads, q.dim() == 3)

    def _messages(self, call: ResolvedCall, rank: int, options: dict[str, object]) -> list[Traffic]:
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
        **options: Any,
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute attention of queries that all ranks have, over keys that stay on their ranks.

        Each rank attends to its own keys. The partial results (out, lse) of all ranks are gathered
        in one exchange and merged. Each rank sends B·T·Hq·(Dv + 1)·4 bytes (8 instead of 4 for
        fp64) to each other rank, for any number of keys. All ranks return the same bits. All
        strategies decode in this way. Decoding has no gradients.

        With `deterministic="ranks"`, one rank computes the queries of a document, as in a call of
        the module. This rank receives all keys of the document in each call.

        The method is from Shyam et al., "Tree Attention: Topology-aware Decoding for Long-Context
        Attention on GPU Clusters" (2024). The paper uses reductions of the partial results instead,
        which take two more exchanges but fewer bytes.

        Args:
            q: (T, Hq, D) or (B, T, Hq, D), the same on all ranks. The last tokens of each document.
            k_cache: (Tkv_local, Hkv, D), with a leading batch dimension if q has one. This rank's
                keys in the layout's local order, including keys of the new tokens.
            v_cache: (Tkv_local, Hkv, Dv), with a leading batch dimension if q has one. This rank's
                values.
            kv_layout: the keys of all documents that each rank holds.
            cu_seqlens: where documents begin in q. Default: all documents have the same number of
                tokens in q.
            causal: whether queries only attend to keys at or before their own position. Default:
                True, unless there is a `mask`.
            softmax_scale: as in a call.
            sinks: as in a call.
            return_lse: whether to return the natural-log lse of the keys, without the sinks.
            options: further arguments, as in a call. `return_max_logits` must be False. In a mask,
                positions of queries count the queries in q.

        Returns:
            out (T, Hq, Dv), with a leading batch dimension if q has one, in q's dtype. With
            `return_lse`, (out, lse), with lse (T, Hq) or (B, T, Hq) in fp32 (fp64 for fp64).

        Raises:
            ValueError: if the call is wrong, or a tensor requires a gradient. The error names the
                argument, and is raised before anything is sent.
        """
        with self.agreeing():
            if as_bool("return_max_logits", options.get("return_max_logits", False)):
                raise ValueError("return_max_logits must be False: decode does not compute them")
            tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "sinks": sinks}
            refuse_gradients(**tensors, softmax_scale=softmax_scale)
            comm, dealt = self._bound.comm, self._bound.strategy.rank_invariant
            layout = layout_of_queries(comm, q, k_cache, cu_seqlens, kv_layout, dealt)
        if causal is ... and options.get("mask") is None:
            causal = True
        options |= {
            "causal": causal,
            "kv_layout": kv_layout,
            "softmax_scale": softmax_scale,
            "sinks": sinks,
            "return_lse": return_lse,
        }
        try:
            if dealt:
                own = q.index_select(q.dim() - 3, layout.token_indices(comm.rank).to(q.device))
                found = self.forward(own, k_cache, v_cache, layout, **options)
                return on_all_ranks(found, layout, comm, q.dim() - 3)
            operands, arguments, heads = self._agreed_inputs(q, k_cache, v_cache, layout, **options)
            results = attend_to_cache(self._bound, arguments, operands)
        # The error names k or v, as in a call. Here users pass k_cache and v_cache.
        except ValueError as fault:
            text = re.sub(r"^([kv]) ", r"\1_cache ", str(fault))
            raise ValueError(text) from None
        return as_result(results, arguments, heads, q.dim() == 3)

    def _preparation(self, described: dict[str, Any], options: dict[str, Any]) -> Preparation:
        strategy, shape = self._bound.strategy, described["shape"]
        if not strategy.rehearses:
            expected = "a module whose messages depend only on the layout"
            raise ValueError(f"attn must be {expected}, got {strategy.name!r}")
        if shape.heads % shape.kv_heads:
            expected = f"a multiple of kv_heads, {shape.kv_heads}"
            raise ValueError(f"heads must be {expected}, got {shape.heads}")
        known = [x for x in call_arguments(self.forward)[4:] if x not in ("kv_layout", "dropout_p")]
        others = {name: x for name, x in options.items() if name not in known}
        if others:
            raise unknown_argument(others, ["value_dim", "batch", *known])
        return SoftmaxPreparation(
            **described,
            has_sinks=as_bool("sinks", options.pop("sinks", False)),
            has_slopes=as_bool("alibi_slopes", options.pop("alibi_slopes", False)),
            options=options,
            backend=current_backend("softmax"),
            deterministic=bool(self.deterministic),
        )

    @outside_graphs
    def mask_area(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any) -> Ints:
        """Return the area that each rank computes in each step, (ranks, steps).

        An area is the number of (query, key) pairs that the mask allows, times the number of query
        heads. Pass the arguments of a call. Of the tensors, only the shapes matter. Nothing is
        computed or sent, and the result is the same on all ranks. Steps in which no rank has work
        are included. If ranks wait for each other in each step, a step takes `area.max(0) /
        area.mean(0)` times as long as with evenly distributed work.
        """
        call = self._resolve(q, k, v, layout, **options)
        steps = [self._bound.strategy.areas(call, rank) for rank in range(self.ranks)]
        return np.array(steps, dtype=np.int64)

    def _operator_inputs(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        *,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> OperatorInputs:
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
        arguments = CallArguments.of(self._key, layout, q.shape[-1], merged, deterministic, options)
        return Operands(q, k, v, sinks), arguments, heads

    def _to_call(self, operands: Operands, arguments: CallArguments) -> ResolvedCall:
        return ATTENTION.resolve(self._bound, operands, arguments)

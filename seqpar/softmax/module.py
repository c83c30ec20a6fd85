"""The module of softmax attention: what all strategies' modules share."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

import seqpar.softmax.operator  # noqa: F401  defines torch.ops.seqpar.attention
from seqpar.arguments import CuSeqlens, Ints
from seqpar.comm.exchange import Group
from seqpar.layout.layout import Layout
from seqpar.module import BoundModule
from seqpar.operands import prepare_operands
from seqpar.softmax.call import CallArguments, ResolvedCall, resolve
from seqpar.softmax.strategy import Strategy


class Attention(BoundModule[Strategy]):
    """Softmax attention over a packed batch whose tokens are spread over the ranks of a group.

    All subclasses take the same call and give the same answer, forward and backward, on any layout;
    they differ in what they send.

    Args:
        group: a process group or a 1-D DeviceMesh.
        check_ranks: compare a digest of each call over the ranks first (32 bytes to each peer), so
            that ranks that disagree all raise the same ValueError instead of hanging.
        deterministic: promise the same bits for the same call; on CPU that holds either way.
        options: the strategy's options.
    """

    strategy: ClassVar[type[Strategy]]
    dimensions: ClassVar[int] = 1  # of the group or mesh

    def __init__(
        self, group: Group, check_ranks: bool = False, deterministic: bool = True, **options: Any
    ) -> None:
        super().__init__(self.strategy(**options), group, self.dimensions, check_ranks)
        self.deterministic = bool(deterministic)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        *,
        causal: bool,
        kv_layout: Layout | None = None,
        prefix_lens: CuSeqlens | None = None,
        window_size: tuple[int, int] = (-1, -1),
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        dropout_p: float = 0.0,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute attention of this rank's queries over the keys of all ranks, within documents.

        The gradients are those of the sum of all ranks' losses. Under autocast q, k and v are cast
        as SDPA's are.

        Args:
            q: (T_local, Hq, D) or (B, T_local, Hq, D), in the layout's local order; fp64, fp32,
                bf16 or fp16.
            k: (Tkv_local, Hkv, D) or with the batch in front; Hq must be a multiple of Hkv.
            v: (Tkv_local, Hkv, Dv), likewise.
            layout: which tokens of the packed batch each rank holds.
            causal: whether a query sees no key behind its own position. It has no default.
            kv_layout: the layout of k and v, where they are other tokens than q (cross attention,
                chunked prefill): the same documents and ranks, ends aligned as in flash-attn.
                Default: `layout`.
            prefix_lens: (documents,) ints. All queries of document i also see its first
                `prefix_lens[i]` keys.
            window_size: (left, right), as in flash-attn: how many keys before and behind its own
                position a query sees; −1 is unlimited, and `causal` cuts right at 0.
            softmax_scale: what q·k is multiplied by. Default: 1/√D.
            softcap: c > 0 turns a score s into c·tanh(s/c), as in Gemma 2.
            sinks: (Hq,), a learnable logit for each head that joins the softmax's denominator, as
                in GPT-OSS. Its gradient is summed over this rank's queries.
            return_lse: also return the natural-log lse of the keys alone, without the sinks.
            dropout_p: must be 0; dropout over sharded keys is not offered.

        Returns:
            out (T_local, Hq, Dv), or with the batch in front, in q's dtype; or (out, lse), both
            differentiable, with lse (T_local, Hq) or (B, T_local, Hq) in fp32 (fp64 for fp64). A
            row that sees no key has out 0 and lse −inf.

        Raises:
            ValueError: if the call is wrong or cannot be computed exactly. It names the argument,
                and is raised before anything is sent.
        """
        arguments = self._arguments(
            q,
            layout,
            causal=causal,
            kv_layout=kv_layout,
            prefix_lens=prefix_lens,
            window_size=window_size,
            softmax_scale=softmax_scale,
            softcap=softcap,
            dropout_p=dropout_p,
            return_lse=return_lse,
        )
        operands = prepare_operands(q, k, v, sinks)
        out, lse, *_ = torch.ops.seqpar.attention(*operands, sinks, *arguments)
        if q.dim() == 3:
            out, lse = out[0], lse[0]
        return (out, lse) if return_lse else out

    def mask_area(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any) -> Ints:
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

    def _resolve(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        *,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> ResolvedCall:
        arguments = self._arguments(q, layout, **options)
        operands = prepare_operands(q, k, v, sinks)
        return resolve(self._bound.comm, arguments, *operands, sinks)

    def _arguments(self, q: Tensor, layout: Layout, **options: Any) -> CallArguments:
        size = self._bound.strategy.merged_size(self.ranks)
        first = self.rank // size * size
        merged = slice(first, first + size)
        options |= {"deterministic": self.deterministic}
        return CallArguments.of(self._key, q, layout, merged, **options)

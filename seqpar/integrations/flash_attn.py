"""flash-attn 2's `flash_attn_func` and `flash_attn_varlen_func`, over the keys of all ranks.

Both functions have three more arguments: `layout`, `group` and `strategy`.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from torch import Tensor

from seqpar.attention.operands import check_layouts
from seqpar.comm.messages.comm import Group
from seqpar.core.arguments import (
    CuSeqlens,
    WindowSize,
    as_bool,
    as_int,
    check_tensor,
    parse_cu_seqlens,
)
from seqpar.core.compiling import outside_graphs
from seqpar.core.torch_private import version_of
from seqpar.integrations.sdpa import attention_on
from seqpar.layout.layout import Layout
from seqpar.softmax.module import Attention

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | Tensor | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    layout: Layout,
    group: Group | None = None,
    strategy: str | Attention = "ring",
    kv_layout: Layout | None = None,
    **options: Any,
) -> Any:
    """Compute flash-attn's function of this name, over the keys of all ranks.

    Errors, gradients and bytes sent are as in the strategy's module: see `Attention`.

    Args:
        q: (B, S_local, Hq, D), this rank's tokens of B sequences, which `layout` describes.
        k: (B, Skv_local, Hkv, D).
        v: (B, Skv_local, Hkv, Dv).
        dropout_p: must be 0.
        softmax_scale: the factor of q·k. None stands for 1/√D.
        causal: whether a query attends only to keys up to its own position. If there are more keys
            than queries, the last query attends to the last key.
        window_size: (left, right); −1 is unlimited.
        softcap: c > 0 turns a score s into c·tanh(s/c).
        alibi_slopes: (Hq,) or (B, Hq) fp32: slope·|i + Lkv − Lq − j| is subtracted from scores.
        deterministic: whether backward must give the same bits each time. For a module, the
            module's own option decides, and True is refused if the module is not deterministic.
        return_attn_probs: return (out, softmax_lse, None), as flash-attn does without dropout. The
            largest scores of the option `return_max_logits` follow these three.
        layout: which tokens each rank holds.
        group: the ranks; omitted if `strategy` is a module.
        strategy: its name, or a module of `make_attention`.
        kv_layout: the layout of k and v, if their tokens differ from those of q.
        options: further options of a module's call, such as `sinks` or `prefix_lens`.

    Returns:
        out (B, S_local, Hq, Dv). With `return_attn_probs`, the tuple (out, softmax_lse, None).
        softmax_lse has shape (B, Hq, S_local) and covers the keys only, without sinks. With the
        option `return_lse` in place of `return_attn_probs`, the tuple is (out, softmax_lse). With
        the option `return_max_logits`, the largest score of each head, (Hq,), comes last.

    Raises:
        ValueError: if the call is wrong or cannot be computed exactly. It names the argument, and
            is raised before anything is sent.
    """
    attn = _attention(group, strategy, deterministic)
    with attn.agreeing():
        _check(q, 4, "(B, S, H, D)")
    options |= {"causal": causal, "kv_layout": kv_layout, "window_size": window_size}
    options |= {"softmax_scale": softmax_scale, "softcap": softcap, "dropout_p": dropout_p}
    options |= {"alibi_slopes": alibi_slopes}
    return _attend(attn, (q, k, v), layout, return_attn_probs, options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: CuSeqlens | None = None,
    cu_seqlens_k: CuSeqlens | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | Tensor | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
    *,
    layout: Layout,
    group: Group | None = None,
    strategy: str | Attention = "ring",
    kv_layout: Layout | None = None,
    **options: Any,
) -> Any:
    """Compute flash-attn's function of this name, over the keys of all ranks.

    This is `flash_attn_func` for packed sequences. `cu_seqlens_q` and `max_seqlen_q` describe the
    whole pack, not this rank's tokens. The layout contains the same values, so both arguments may
    be None; values that differ from the layout's are refused. A tensor on a GPU is copied to the
    host for this comparison only in the first call and after a write to the tensor.

    Args:
        q: (T_local, Hq, D), this rank's tokens, in the layout's local order.
        k: (Tkv_local, Hkv, D).
        v: (Tkv_local, Hkv, Dv).
        cu_seqlens_q: the boundaries of the documents of `layout`; None in compiled functions.
        cu_seqlens_k: the boundaries of the documents of `kv_layout`, or of `layout` if there is no
            `kv_layout`; None in compiled functions.
        max_seqlen_q: at least the length of the longest document of `layout`.
        max_seqlen_k: at least the length of the longest document of the keys.
        dropout_p, softmax_scale, causal, window_size, softcap: as in `flash_attn_func`.
        alibi_slopes: (Hq,) fp32, as in `flash_attn_func`. Positions are counted within documents.
        deterministic, return_attn_probs: as in `flash_attn_func`.
        block_table: must be None, because paged caches are not supported.
        layout, group, strategy, kv_layout, options: as in `flash_attn_func`.

    Returns:
        out (T_local, Hq, Dv), or with `return_attn_probs` (out, softmax_lse (Hq, T_local), None).
        The options `return_lse` and `return_max_logits` work as in `flash_attn_func`.

    Raises:
        ValueError: if the call is wrong or cannot be computed exactly. It names the argument, and
            is raised before anything is sent.
    """
    attn = _attention(group, strategy, deterministic)
    keys = layout if kv_layout is None else kv_layout
    with attn.agreeing():
        if block_table is not None:
            raise ValueError("block_table must be None: paged caches are not supported")
        _check(q, 3, "(T, H, D)")
        check_layouts(layout=layout, kv_layout=keys)
        if cu_seqlens_q is not None:
            _check_documents("cu_seqlens_q", cu_seqlens_q, layout)
        if cu_seqlens_k is not None:
            _check_documents("cu_seqlens_k", cu_seqlens_k, keys)
        if max_seqlen_q is not None:
            _check_longest("max_seqlen_q", max_seqlen_q, layout)
        if max_seqlen_k is not None:
            _check_longest("max_seqlen_k", max_seqlen_k, keys)
    options |= {"causal": causal, "kv_layout": kv_layout, "window_size": window_size}
    options |= {"softmax_scale": softmax_scale, "softcap": softcap, "dropout_p": dropout_p}
    options |= {"alibi_slopes": alibi_slopes}
    return _attend(attn, (q, k, v), layout, return_attn_probs, options)


def _attention(group: Group | None, strategy: str | Attention, deterministic: bool) -> Attention:
    deterministic = as_bool("deterministic", deterministic)
    if not isinstance(strategy, Attention):
        return attention_on(group, strategy, deterministic=deterministic)
    attn = attention_on(group, strategy)
    if deterministic and not attn.deterministic:
        raise ValueError(
            "deterministic must be False with a module that is not deterministic: make the module "
            "with deterministic=True"
        )
    return attn


def _attend(
    attn: Attention, qkv: tuple[Tensor, ...], layout: Layout, with_probs: bool, options: Any
) -> Any:
    with attn.agreeing():
        probs = as_bool("return_attn_probs", with_probs)
        returns_lse = as_bool("return_lse", options.pop("return_lse", False)) or probs
    result = attn(*qkv, layout, return_lse=returns_lse, **options)
    if not isinstance(result, tuple):
        return result
    out, *more = result
    if returns_lse:
        more[0] = more[0].transpose(-2, -1)
    if probs:
        more.insert(1, None)
    return out, *more


def _check(q: Tensor, dims: int, shape: str) -> None:
    check_tensor("q", q)
    if q.dim() != dims:
        raise ValueError(f"q must be {shape}, got {tuple(q.shape)}")


@outside_graphs
def _check_documents(name: str, cu_seqlens: CuSeqlens, layout: Layout) -> None:
    """Raise a ValueError if `cu_seqlens` differs from the boundaries of the layout's documents."""
    read: WeakValueDictionary[tuple[int, int], Tensor]
    read = layout.geometry.derived(("cu_seqlens read",), WeakValueDictionary)
    key = None
    # Inference tensors have no version counter, so they are read in each call.
    if isinstance(cu_seqlens, Tensor) and not cu_seqlens.is_inference():
        key = id(cu_seqlens), version_of(cu_seqlens)
        if read.get(key) is cu_seqlens:
            return
    boundaries = parse_cu_seqlens(cu_seqlens, name)
    if not np.array_equal(boundaries, layout.geometry.cu_seqlens):
        expected = f"the layout's, of {layout.documents} documents up to {layout.tokens}"
        got = f"{boundaries.size - 1} documents up to {boundaries[-1]}"
        raise ValueError(f"{name} must be {expected}, got {got}")
    if isinstance(cu_seqlens, Tensor) and key is not None:
        read[key] = cu_seqlens


@outside_graphs
def _check_longest(name: str, longest: int, layout: Layout) -> None:
    actual = int(layout.geometry.lengths.max(initial=0))
    if as_int(name, longest, 0) < actual:
        raise ValueError(
            f"{name} must be at least {actual}, the layout's longest document, got {longest}"
        )

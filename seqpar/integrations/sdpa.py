"""Attention with the arguments of `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from seqpar.attention.operands import check_layouts
from seqpar.comm.messages.comm import Group
from seqpar.core.arguments import as_bool, as_float, check_tensor, shown
from seqpar.core.compiling import outside_graphs
from seqpar.layout.layout import Layout
from seqpar.softmax.module import Attention
from seqpar.strategies.registry import attention_modules, make_attention


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    group: Group | None = None,
    strategy: str | Attention = "ring",
    *,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    kv_layout: Layout | None = None,
    axes: str | None = None,
    **options: Any,
) -> Any:
    """Compute `F.scaled_dot_product_attention` over the keys of all ranks.

    The arguments and the order of axes are those of SDPA. Documents do not attend to each other.
    Errors, gradients and bytes sent are as in the strategy's module: see `Attention`.

    Args:
        query: (B, Hq, T_local, D) or (Hq, T_local, D), this rank's tokens in the layout's order.
            DTensors may shard their heads.
        key: (B, Hkv, Tkv_local, D), or without the batch.
        value: (B, Hkv, Tkv_local, Dv), or without the batch.
        layout: which tokens each rank holds.
        group: the ranks: a process group or a mesh; omitted if `strategy` is a module.
        strategy: the strategy's name, or a module that `make_attention` returned. A module has its
            own options and saves the time for making one in each call. Compiled functions need a
            module.
        attn_mask: must be None. The layout separates documents; other masks are `prefix_lens`,
            `window_size` and `is_causal`.
        dropout_p: must be 0.
        is_causal: whether a query attends only to keys up to its own position in the document.
        scale: the factor of q·k. None stands for 1/√D.
        enable_gqa: whether `key` can have fewer heads than `query`. Query head h then uses key head
            ⌊h·Hkv/Hq⌋.
        kv_layout: the layout of key and value, if their tokens differ from those of `query`. With
            `is_causal`, each document must have as many keys as queries, because for unequal
            numbers SDPA aligns the first query with the first key, and modules align the last query
            with the last key.
        axes: "bhsd" confirms that the axes are in SDPA's order. It is required only if a rank's
            number of tokens equals the number of heads, because the shapes then do not show the
            order.
        options: further options of a module's call, such as `window_size`, `softcap` or `sinks`.

    Returns:
        out (B, Hq, T_local, Dv), or (Hq, T_local, Dv) if `query` has no batch dimension, in query's
        dtype. With the option `return_lse`, the tuple (out, lse); lse has the shape of out without
        Dv. With the option `return_max_logits`, the largest score of each head, (Hq,), is the last
        entry of the tuple.

    Raises:
        ValueError: if the call is wrong or cannot be computed exactly. It names the argument, and
            is raised before anything is sent.
    """
    attn = attention_on(group, strategy)
    operands = query, key, value
    arguments = SdpaArguments(attn_mask, dropout_p, is_causal, enable_gqa, axes)
    with attn.agreeing():
        check_call(attn, operands, layout, kv_layout, arguments)
    return attend(attn, operands, layout, is_causal, scale, kv_layout, **options)


class SdpaArguments(NamedTuple):
    attn_mask: object
    dropout_p: float
    is_causal: bool
    enable_gqa: bool
    axes: str | None


def attend(
    attn: Attention,
    operands: tuple[Tensor, Tensor, Tensor],
    layout: Layout,
    is_causal: bool,
    scale: float | Tensor | None,
    kv_layout: Layout | None = None,
    **options: Any,
) -> Any:
    q, k, v = (x.transpose(-3, -2) for x in operands)
    own = {"causal": is_causal, "softmax_scale": scale, "kv_layout": kv_layout}
    try:
        result = attn(q, k, v, layout, **own, **options)
    except (ValueError, TypeError) as fault:
        name, _, text = str(fault).partition(" ")
        for own_name in "qkv":
            text = text.replace(f" {own_name}'s ", f" {_NAMES[own_name]}'s ")
        kind = TypeError if isinstance(fault, TypeError) else ValueError
        raise kind(f"{_NAMES.get(name, name)} {text}") from None
    if not isinstance(result, tuple):
        return result.transpose(-3, -2)
    out, *more = result
    if options.get("return_lse", False):
        more[0] = more[0].transpose(-2, -1)
    return out.transpose(-3, -2), *more


# For each argument of a module's call, the name of the same argument of `sdpa`.
_NAMES = {"q": "query", "k": "key", "v": "value", "causal": "is_causal", "softmax_scale": "scale"}


def attention_on(group: Group | None, strategy: str | Attention, **options: Any) -> Attention:
    if not isinstance(strategy, Attention):
        if not isinstance(strategy, str) or strategy not in attention_modules():
            expected = f"an attention module, or one of {sorted(attention_modules())}"
            raise ValueError(f"strategy must be {expected}, got {shown(strategy)}")
        try:
            return make_attention(strategy, group, **options)  # type: ignore[arg-type]  # refused
        except ValueError as fault:  # some errors name the argument `mesh`, which is `group` here
            text = str(fault)
            raise ValueError(f"group{text[4:]}" if text.startswith("mesh ") else text) from None
    if group is not None:
        raise ValueError("group must be left out if strategy is a module, which has a group")
    if options:
        raise ValueError(
            f"{next(iter(options))} must be set when the module that is the strategy is made"
        )
    return strategy


def check_call(
    attn: Attention,
    operands: tuple[Tensor, Tensor, Tensor],
    layout: Layout,
    kv_layout: Layout | None,
    arguments: SdpaArguments,
    advice: Callable[[Tensor, Tensor], str] | None = None,
) -> None:
    """Raise a ValueError for SDPA arguments that are not supported.

    `advice(query, key)` is appended to an error about the number of tokens.
    """
    query, key, _ = operands
    attn_mask, dropout_p, is_causal, enable_gqa, axes = arguments
    if attn_mask is not None:
        instead = (
            "the layout describes documents, and prefix_lens and window_size are further masks"
        )
        enable = "transformers makes a mask where position_ids jump: enable its models by seqpar's"
        raise ValueError(f"attn_mask must be None: {instead}. {enable} huggingface.enable")
    if as_float("dropout_p", dropout_p) != 0:
        raise ValueError(f"dropout_p must be 0, got {dropout_p}: no rank has all of the weights")
    keys_of = layout if kv_layout is None else kv_layout
    check_layouts(layout=layout, kv_layout=keys_of)
    for name, given in (("layout", layout), ("kv_layout", keys_of)):
        if given.ranks != attn.ranks:
            expected = f"the group's {attn.ranks} ranks"
            raise ValueError(f"{name} must be for {expected}, got one for {given.ranks}")
    causal = as_bool("is_causal", is_causal)
    if causal and kv_layout is not None and not _as_long(layout, kv_layout):
        reason = (
            "SDPA aligns the first query with the first key, and modules align the last "
            "ones; call a module"
        )
        raise ValueError(f"is_causal must be False where kv_layout has other lengths: {reason}")
    if axes is not None and (not isinstance(axes, str) or axes != "bhsd"):
        raise ValueError(f'axes must be "bhsd" or None, got {shown(axes)}')
    tokens, kv_tokens = layout.tokens_on(attn.rank), keys_of.tokens_on(attn.rank)
    held_tokens = tokens, kv_tokens, kv_tokens
    for name, x, held in zip(("query", "key", "value"), operands, held_tokens, strict=True):
        check_tensor(name, x)
        if x.dim() not in (3, 4) or x.shape[-2] != held:
            expected = f"(B, H, {held}, D) or (H, {held}, D), with this rank's tokens"
            end = "" if advice is None else f": {advice(query, key)}"
            raise ValueError(f"{name} must be {expected}, got {tuple(x.shape)}{end}")
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if heads != kv_heads and not as_bool("enable_gqa", enable_gqa):
        found = f"{heads} heads of query and {kv_heads} of key"
        raise ValueError(f"enable_gqa must be True for {found}, got False")
    if axes is None and heads == kv_heads:
        _check_axes(layout, keys_of, heads)


@outside_graphs
def _as_long(layout: Layout, kv_layout: Layout) -> bool:
    return np.array_equal(layout.geometry.cu_seqlens, kv_layout.geometry.cu_seqlens)


def _check_axes(layout: Layout, kv_layout: Layout, heads: int) -> None:
    """Raise a ValueError on all ranks if the shapes on one rank do not show which axis is the
    tokens and which axis is the heads.
    """
    for rank in range(layout.ranks):
        if layout.tokens_on(rank) == heads == kv_layout.tokens_on(rank):
            reason = f"rank {rank} has as many tokens as there are heads, {heads}"
            raise ValueError(f'axes must be "bhsd", to say that tokens are axis -2, since {reason}')

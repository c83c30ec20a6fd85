"""Give position embeddings the positions of this rank's tokens, where a model counts its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from seqpar.integrations.huggingface.attention.call import ModelCall, current
from seqpar.integrations.huggingface.attention.own_attention import has_slopes
from seqpar.integrations.huggingface.model.code import has_buckets, is_formula, is_table, takes

_GROWING = ("dynamic", "longrope")  # rotary embeddings that depend on the longest position


def takes_positions(model: nn.Module) -> bool:
    if takes(model, "position_ids"):
        return True
    kinds = is_table, is_formula, has_buckets, has_slopes
    return any(is_kind(x) for x in model.modules() for is_kind in kinds)


def add_hooks(model: nn.Module, encoder: nn.Module | None) -> list[RemovableHandle]:
    inside = set() if encoder is None else set(encoder.modules())
    handles = []
    for x in model.modules():
        if is_table(x):
            hook = _positions_of(x in inside)
            handles.append(x.register_forward_pre_hook(hook, with_kwargs=True))
        if is_formula(x):
            handles.append(x.register_forward_hook(_by_formula(x in inside)))
        kinds = getattr(x, "rope_type", None)
        kinds = list(kinds.values()) if isinstance(kinds, dict) else [kinds]
        if any(kind in _GROWING for kind in kinds):
            handles.append(x.register_forward_pre_hook(_with_last, with_kwargs=True))
            handles.append(x.register_forward_hook(_without_last))
    return handles


def _positions_of(in_encoder: bool) -> Callable[..., Any]:
    def hook(x: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = _call()
        bound = inspect.signature(type(x).forward).bind(x, *args, **kwargs)
        positions = call.side(in_encoder).position_ids
        bound.arguments["position_ids"] = None if positions is None else positions[0]
        return bound.args[1:], bound.kwargs

    return hook


def _by_formula(in_encoder: bool) -> Callable[..., Any]:
    def hook(x: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
        side = _call().side(in_encoder)
        if side.last_position >= len(x.weights):
            x.make_weights(side.last_position + 1, x.embedding_dim, x.padding_idx)
        return x.weights[side.position_ids].to(output)

    return hook


def _with_last(x: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Append the greatest position of all ranks to this rank's positions."""
    call = _call()
    bound = inspect.signature(type(x).forward).bind(x, *args, **kwargs)
    positions = bound.arguments["position_ids"]
    last = positions.new_full((*positions.shape[:-1], 1), call.sharding.main.last_position)
    bound.arguments["position_ids"] = torch.cat([positions, last], -1)
    return bound.args[1:], bound.kwargs


def _without_last(x: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(part[..., :-1, :] for part in output)
    return output[..., :-1, :]


def _call() -> ModelCall:
    call = current.call
    if call is None:
        reason = "they are computed outside of its call, or recomputed"
        raise ValueError(f"the model's embeddings of positions need its sharded batch: {reason}")
    return call

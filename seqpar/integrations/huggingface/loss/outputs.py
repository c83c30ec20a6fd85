"""Gather a model's outputs from all ranks, and clear the rows of padding in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from seqpar.comm.messages.exchange import Comm
from seqpar.integrations.huggingface.batch.sharding import KEY, Sharding, Side, note_tokens

_OF_TEXT = (
    "hidden_states", "language_model_outputs", "last_hidden_state", "logits", "router_logits",
)  # fmt: skip
_FLAT = ("router_logits",)  # (T, experts), the tokens of all rows


def mark(outputs: Any, sharding: Sharding, *, in_encoder: bool = False, flat: bool = False) -> None:
    """Note on each output tensor which tokens its rows are. `flat` tensors are (T_local, …)."""
    if isinstance(outputs, Mapping):
        for name, value in outputs.items():
            if sharding.whole and name not in _OF_TEXT:
                _mark_whole(value)
                continue
            encoder = sharding.encoder is not None and name.startswith("encoder_")
            mark(value, sharding, in_encoder=encoder, flat=name in _FLAT)
    elif isinstance(outputs, list | tuple):
        for value in outputs:
            mark(value, sharding, in_encoder=in_encoder, flat=flat)
    elif isinstance(outputs, Tensor):
        side = sharding.encoder if in_encoder else sharding.main
        if side is not None and _is_of(outputs[None] if flat else outputs, side):
            note_tokens(outputs, side)


def _mark_whole(outputs: Any) -> None:
    if isinstance(outputs, Tensor):
        setattr(outputs, KEY, None)
    elif isinstance(outputs, list | tuple | Mapping):
        for value in outputs.values() if isinstance(outputs, Mapping) else outputs:
            _mark_whole(value)


class _Cleared(torch.autograd.Function):
    """An output whose last `padding` rows, which the layout added, are zeros without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, padding: int, in_place: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.rows = dim, x.shape[dim] - padding, padding
        cleared = x.data if in_place else x.detach().clone()
        cleared.narrow(*ctx.rows).zero_()
        return cleared

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        if gradient is not None:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            gradient.narrow(*ctx.rows).zero_()
        return gradient, None, None, None


def clear_padding(outputs: Any) -> Any:
    """Return marked outputs with zeros in the rows of padding, which pass no gradient on.

    Logits are cleared in place, because a copy could double a step's memory and no backward needs
    them. Others, such as hidden states, may be inputs of recomputed layers, and are copied.
    """
    return _cleared(outputs, "", {})


def _cleared(nested: Any, name: str, known: dict[int, Tensor]) -> Any:
    if isinstance(nested, Mapping):
        return type(nested)(**{key: _cleared(x, key, known) for key, x in nested.items()})
    if type(nested) in (list, tuple):
        return type(nested)(_cleared(x, name, known) for x in nested)
    side = getattr(nested, KEY, None) if isinstance(nested, Tensor) else None
    if side is None or not side.padding:
        return nested
    if id(nested) not in known:
        dim = int(_is_of(nested, side))  # otherwise flat
        known[id(nested)] = _Cleared.apply(nested, dim, side.padding, name == "logits")
    return known[id(nested)]


def unshard(outputs: Any, sharding: Sharding | None, comm: Comm) -> Any:
    if isinstance(outputs, Mapping):
        whole = {name: unshard(value, sharding, comm) for name, value in outputs.items()}
        return type(outputs)(**whole)
    if isinstance(outputs, list | tuple):
        return type(outputs)(unshard(value, sharding, comm) for value in outputs)
    if not isinstance(outputs, Tensor) or outputs.dim() == 0:
        return outputs
    side = getattr(outputs, KEY, None)
    if side is None and hasattr(outputs, KEY):
        return outputs
    if side is None and sharding is not None and _is_of(outputs, sharding.main):
        side = sharding.main
    if side is None:
        found = f"a tensor {tuple(outputs.shape)} that the model did not return so"
        raise ValueError(f"outputs must be a model's, got {found}: give its sharded batch too")
    if not _is_of(outputs, side):  # flat
        return side.put_back(outputs[None], comm).flatten(0, 1)
    return side.put_back(outputs, comm)


def _is_of(x: Tensor, side: Side) -> bool:
    return tuple(x.shape[:2]) == (1, side.tokens)

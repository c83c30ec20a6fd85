"""Gather a model's outputs from all ranks, and set the rows of padding in outputs to 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from seqpar.comm.messages.comm import Comm
from seqpar.integrations.huggingface.batch.sharding import KEY, Sharding, Side, note_tokens

_OF_TEXT = (
    "hidden_states", "language_model_outputs", "last_hidden_state", "logits", "router_logits",
)  # fmt: skip
# Outputs of shape (T, …), whose first dimension is the tokens of all rows.
_FLAT = ("router_logits",)


def tensors_in(nested: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield the tensors in nested mappings, lists and tuples, each with the keys that lead to
    it.
    """
    if isinstance(nested, Tensor):
        yield names, nested
    elif isinstance(nested, Mapping):
        for name, value in nested.items():
            yield from tensors_in(value, *names, name)
    elif isinstance(nested, list | tuple):
        for value in nested:
            yield from tensors_in(value, *names)


def with_tensors(nested: Any, function: Callable[[Tensor, str], Tensor], name: str = "") -> Any:
    """Return nested mappings, lists and tuples with `function(tensor, name)` in place of each
    tensor.

    Instances of subclasses of these types are returned unchanged, except named tuples.
    """
    if isinstance(nested, Tensor):
        return function(nested, name)
    if isinstance(nested, Mapping):
        made = {name: with_tensors(value, function, name) for name, value in nested.items()}
        return type(nested)(**made)
    if type(nested) in (list, tuple) or hasattr(nested, "_make"):
        make = getattr(nested, "_make", type(nested))
        return make(with_tensors(value, function, name) for value in nested)
    return nested


def mark(outputs: Any, sharding: Sharding) -> None:
    """Note on each output tensor to which tokens its rows belong."""
    for names, x in tensors_in(outputs):
        of_rows = sharding.last_tokens is not None and names == ("logits",)
        if of_rows or (sharding.whole and not set(names).issubset(_OF_TEXT)):
            setattr(x, KEY, None)
            continue
        name = names[-1] if names else ""
        side = (name.startswith("encoder_") and sharding.encoder) or sharding.main
        if _is_of(x[None] if name in _FLAT else x, side):
            note_tokens(x, side)


def check_of_tokens(outputs: Any) -> None:
    """Raise an error if outputs have one value per sequence, such as (1, D), instead of one value
    per token.
    """
    from transformers.utils.generic import ModelOutput

    if not isinstance(outputs, ModelOutput):
        return
    for names, x in tensors_in(outputs):
        if x.is_floating_point() and x.shape[:1] == (1,) and not hasattr(x, KEY):
            found = f"{'.'.join(names)} is {tuple(x.shape)}"
            reason = "it answers for whole sequences, and no rank has all tokens of a sequence"
            raise ValueError(f"model must return values for each token, but {found}: {reason}")


class _Cleared(torch.autograd.Function):
    """Sets the last `padding` rows of an output, and of its gradient, to 0."""

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
    """Return the outputs with zeros in the rows that belong to padding of the layout. Backward
    passes no gradient through these rows.
    """
    cleared: dict[int, Tensor] = {}

    def clear(x: Tensor, name: str) -> Tensor:
        side = getattr(x, KEY, None)
        if side is None or not side.padding:
            return x
        if id(x) not in cleared:
            dim = int(_is_of(x, side))  # for `_FLAT`, tokens are dimension 0
            # Logits are changed in place, because a copy could double the memory of a step, and no
            # backward reads them. Other outputs, such as hidden states, are copied, because layers
            # that are recomputed in backward can need the originals.
            cleared[id(x)] = _Cleared.apply(x, dim, side.padding, name == "logits")
        return cleared[id(x)]

    return with_tensors(outputs, clear)


def unshard(outputs: Any, sharding: Sharding | None, comm: Comm) -> Any:
    def put_back(x: Tensor, _: str) -> Tensor:
        side = getattr(x, KEY, None)
        if x.dim() == 0 or (side is None and hasattr(x, KEY)):
            return x
        if side is None and sharding is not None and _is_of(x, sharding.main):
            side = sharding.main
        if side is None:
            raise ValueError(
                "outputs must be tensors that the model returned, unchanged, got one of shape "
                f"{tuple(x.shape)}: for a tensor that you computed, pass the sharded batch too, as "
                "sp.unshard(outputs, batch)"
            )
        if not _is_of(x, side):  # tokens are dimension 0
            return side.put_back(x[None], comm).flatten(0, 1)
        return side.put_back(x, comm)

    return with_tensors(outputs, put_back)


def _is_of(x: Tensor, side: Side) -> bool:
    return tuple(x.shape[:2]) == (1, side.tokens)

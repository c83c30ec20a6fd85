"""The positions that a model gives to tokens when a batch has no position ids."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.integrations.huggingface.model.code import columns_of


def default_positions(model: nn.Module, batch: dict[str, Any], rows: int, columns: int) -> Tensor:
    """Return the positions (B, S) that the model would give the tokens of a whole batch."""
    for x in model.modules():
        if (make := _numbering(x)) is not None:
            if "input_ids" not in batch:
                raise ValueError("position_ids must be given where input_ids are not")
            return make(batch["input_ids"], getattr(x, "padding_idx"))  # noqa: B009
    device = (batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"]).device
    mask = batch.get("attention_mask")
    if mask is not None and _counts_mask(model):
        return (mask.long().cumsum(1) - 1).clamp(min=0)
    return torch.arange(columns, device=device).expand(rows, columns)


def _numbering(x: nn.Module) -> Callable[..., Tensor] | None:
    """Return the function that numbers tokens from their padding, as RoBERTa's does, or None."""
    name = "create_position_ids_from_input_ids"
    if not is_formula(x) and not isinstance(getattr(x, "position_embeddings", None), nn.Embedding):
        return None
    return getattr(x, name, None) or getattr(sys.modules[type(x).__module__], name, None)


def is_table(x: nn.Module) -> bool:
    """Return whether a module is a table of position embeddings that counts positions itself."""
    return isinstance(x, nn.Embedding) and _takes(x, "position_ids")


def is_formula(x: nn.Module) -> bool:
    """Return whether a module computes position embeddings by a formula, as M2M100 does."""
    name = "create_position_ids_from_input_ids"
    return hasattr(x, name) and isinstance(getattr(x, "weights", None), Tensor)


def _counts_mask(model: nn.Module) -> bool:
    """Return whether positions skip padding: by a table that gets no positions from around."""
    return any(
        is_table(x) and _takes(x, "attention_mask") and not columns_of(type(around))
        for around in model.modules()
        for x in around.children()
    )


def _takes(x: nn.Module, name: str) -> bool:
    return name in inspect.signature(type(x).forward).parameters

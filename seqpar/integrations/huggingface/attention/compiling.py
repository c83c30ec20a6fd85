"""Compile a whole model. The code that makes masks and checks calls stays outside of the graph."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from seqpar.integrations.huggingface.attention.call import (
    ModelCall,
    PreparedMask,
    ShardedMask,
    current,
)
from seqpar.integrations.huggingface.attention.masks import MaskShape
from seqpar.integrations.huggingface.model.replaced import Replaced


class CompiledForward(Replaced):
    """A model's compiled forward, until `remove`."""

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        self._eager = model.forward
        self._forward = torch.compile(model.forward, **options)
        self.__signature__ = inspect.signature(model.forward)  # Trainers read it to choose columns
        super().__init__(model, "forward", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = current.call
        compiled = call is not None and call.cache is None and not call.session.mixing.watches
        return (self._forward if compiled else self._eager)(*args, **kwargs)


def prepared_masks(call: ModelCall) -> Any:
    """Return the model's mask argument: one mask for all layers, or one for each kind.

    The masks are made before the model runs, because Dynamo cannot make them.
    """
    from transformers.masking_utils import create_masks_for_generate

    make = getattr(call.session.inner, "create_masks_for_generate", create_masks_for_generate)
    side = call.sharding.main
    embeddings = torch.empty((), device=side.index.device).expand(1, side.tokens, 1)
    nothing = dict.fromkeys(("attention_mask", "past_key_values", "position_ids"))
    before = current.set(call)
    try:
        made = make(config=call.session.inner.config, inputs_embeds=embeddings, **nothing)
    finally:
        current.set(before)
    if isinstance(made, dict):
        window = getattr(call.session.inner.config, "sliding_window", None)
        if window is not None and not any("sliding" in kind for kind in made):
            reason = f"its sliding_window, {window}, is not that of a kind of its layers"
            raise ValueError(f"model cannot be compiled whole: {reason}")
        # Without padding, transformers makes no mask for recurrent layers.
        recurrent_mask = ShardedMask(call, MaskShape(causal=True))
        made = {kind: mask or recurrent_mask for kind, mask in made.items()}
    for mask in made.values() if isinstance(made, dict) else [made]:
        if mask.pattern.chunk is not None:
            side.in_chunks(mask.pattern.chunk)  # made here, because a graph cannot make layouts
    return PreparedMask(made.call, made.pattern) if isinstance(made, ShardedMask) else made

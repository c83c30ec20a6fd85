"""Find the kinds of calls that a model makes, so that their tables can be built ahead of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from seqpar.integrations.huggingface.attention.call import EnabledModel
from seqpar.integrations.huggingface.batch.sharding import KEY
from seqpar.softmax.rehearsal import Preparation

# The options of a call that do not depend on the batch, and are also options of a preparation.
_OPTIONS = "causal", "window_size", "softmax_scale", "softcap"
_OF_ONE_BATCH = "kv_layout", "mask", "prefix_lens", "alibi_slopes"


@torch.no_grad()
def find_calls(session: EnabledModel, part: Any, backward: bool) -> tuple[Preparation, ...]:
    """Run the session's model on its part of a batch, as in evaluation; return its kinds of calls.

    Calls whose tables depend on more than the batch's documents are left out.
    """
    layout, kinds = part[KEY].main.layout, dict[Any, Preparation]()

    def note(attention: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if args[3] is not layout or any(kwargs.get(x) is not None for x in _OF_ONE_BATCH):
            return
        (q, k, v, sinks), *_ = session.attention._operator_inputs(*args, **kwargs)
        options = {name: kwargs[name] for name in _OPTIONS if name in kwargs}
        options |= {"batch": q.shape[0], "heads": q.shape[2], "kv_heads": k.shape[2]}
        options |= {"head_dim": q.shape[3], "value_dim": v.shape[3], "dtype": q.dtype}
        options |= {"sinks": sinks is not None, "device": q.device, "backward": backward}
        key = tuple(options.items())
        if key not in kinds:
            kinds[key] = session.attention.preparation(**options)

    training = {module: module.training for module in session.model.modules()}
    session.model.eval()
    handle = session.attention.register_forward_pre_hook(note, with_kwargs=True)
    try:
        session.model(**part)
    finally:
        handle.remove()
        for module, was in training.items():
            module.training = was
    return tuple(kinds.values())

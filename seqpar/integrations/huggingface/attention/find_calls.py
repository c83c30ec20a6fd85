"""Find the kinds of calls that a model makes, so that their tables can be built ahead of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from seqpar.attention.rehearsal import Preparation
from seqpar.integrations.huggingface.attention.call import EnabledModel
from seqpar.integrations.huggingface.batch.sharding import KEY


@torch.no_grad()
def find_calls(session: EnabledModel, part: Any, **known: Any) -> tuple[Preparation, ...]:
    """Run the model once, in evaluation mode; return a preparation for each kind of call it makes.

    `part` is this rank's part of a batch. Calls whose tables depend on more than the batch's
    documents are left out. `known` are arguments of `Attention.preparation`; they replace the
    values that the run finds.
    """
    layout, kinds = part[KEY].main.layout, dict[Any, Preparation]()

    def note(attention: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        try:
            (q, k, v, sinks), call, _ = session.attention._operator_inputs(*args, **kwargs)
        except (ValueError, TypeError):
            return  # the call itself raises it, on all ranks
        of_this_batch = kwargs.get("kv_layout"), call.prefix_lens, call.ranges, call.alibi_slopes
        if args[3] is not layout or any(x is not None for x in of_this_batch):
            return
        options: dict[str, Any] = {"causal": call.causal, "window_size": (call.left, call.right)}
        options |= {"softmax_scale": call.scale, "softcap": call.softcap}
        options |= {"batch": q.shape[0], "heads": q.shape[2], "kv_heads": k.shape[2]}
        options |= {"head_dim": q.shape[3], "value_dim": v.shape[3], "sinks": sinks is not None}
        options |= {"dtype": q.dtype, "device": q.device} | known
        key = tuple(options.items())
        if key not in kinds:
            kinds[key] = session.attention.preparation(**options)

    training = {module: module.training for module in session.model.modules()}
    session.model.eval()
    handle = session.attention.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled code may skip the hook
            session.model(**part)
    finally:
        handle.remove()
        for module, was in training.items():
            module.training = was
    return tuple(kinds.values())

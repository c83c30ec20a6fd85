"""Find the different attention calls that a model makes, so that their tables can be built ahead of
a step.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from seqpar.attention.rehearsal import Preparation
from seqpar.integrations.huggingface.attention.call import EnabledModel
from seqpar.integrations.huggingface.attention.recurrent import PatchedRecurrence
from seqpar.integrations.huggingface.batch.sharding import KEY
from seqpar.linear.module import LinearModule


@torch.no_grad()
def find_calls(session: EnabledModel, part: Any, **known: Any) -> tuple[Preparation, ...]:
    """Find the different attention calls of a model, and return a `Preparation` for each, which
    builds the tables of the call.

    The model runs once in evaluation mode, on `part`, this rank's part of a batch. Attention calls
    whose tables depend on more than the batch's documents are left out. `known` are arguments of
    the method `preparation` of the attention module. They replace the values that were observed in
    the run.
    """
    layout, kinds = part[KEY].main.layout, dict[Any, Preparation]()

    def note(find: Any, attention: Any, args: Any, kwargs: dict[str, Any]) -> None:
        try:
            found = find(attention, args, kwargs)
        except (ValueError, TypeError):
            return  # the call itself raises the error, on all ranks
        for options in found if args[3] is layout else ():
            key = attention, *options.items()
            if key not in kinds:
                kinds[key] = attention.preparation(**options)

    of_softmax = partial(_softmax_call, known)
    finders: dict[nn.Module, Any] = {session.attention: partial(note, of_softmax)}
    for layer in session.layers.values():
        if layer.linear is not None:
            of_linear = partial(_linear_call, known)
            finders[layer.linear.attention] = partial(note, of_linear)  # type: ignore[attr-defined]
        elif layer.recurrence is not None and layer.recurrence.attention is not None:
            of_recurrence = partial(_recurrent_call, known, layer.recurrence)
            finders[layer.recurrence.attention] = partial(note, of_recurrence)
    training = {module: module.training for module in session.model.modules()}
    session.model.eval()
    handles = [x.register_forward_pre_hook(y, with_kwargs=True) for x, y in finders.items()]
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled code may skip the hooks
            session.model(**part)
    finally:
        for handle in handles:
            handle.remove()
        for module, was in training.items():
            module.training = was
    return tuple(kinds.values())


def _softmax_call(
    known: dict[str, Any], attention: Any, args: Any, kwargs: dict[str, Any]
) -> list[dict[str, Any]]:
    (q, k, v, sinks), call, _ = attention._operator_inputs(*args, **kwargs)
    of_this_batch = kwargs.get("kv_layout"), call.prefix_lens, call.ranges
    if any(x is not None for x in of_this_batch):
        return []
    options: dict[str, Any] = {"causal": call.causal, "window_size": (call.left, call.right)}
    options |= {"softmax_scale": call.options.scale, "softcap": call.options.softcap}
    options |= {"batch": q.shape[0], "heads": q.shape[2], "kv_heads": k.shape[2]}
    options |= {"head_dim": q.shape[3], "value_dim": v.shape[3]}
    options |= {"sinks": sinks is not None}
    return [options | {"dtype": q.dtype, "device": q.device} | known]


def _linear_call(
    known: dict[str, Any], attention: LinearModule, args: Any, kwargs: dict[str, Any]
) -> list[dict[str, Any]]:
    (q, k, v, _, _, initial), call, _ = attention._operator_inputs(*args, **kwargs)
    heads = {"heads": q.shape[-2], "kv_heads": max(k.shape[-2], v.shape[-2])}
    options = heads | {"head_dim": q.shape[-1], "value_dim": v.shape[-1]}
    states = {"initial_state": initial is not None, "return_state": call.return_state}
    options |= {"causal": call.causal, **states}
    return [options | {"dtype": q.dtype, "device": q.device} | known]


def _recurrent_call(
    known: dict[str, Any],
    recurrence: PatchedRecurrence,
    attention: LinearModule,
    args: Any,
    kwargs: dict[str, Any],
) -> list[dict[str, Any]]:
    """Return a list with the arguments of `RecurrentAttention.preparation` for each dtype in which
    a training step can compute.
    """
    (options,) = _linear_call(known, attention, args, kwargs)
    if known.keys().isdisjoint(("dtype", "device")):
        return [options]
    # The dtype of a recurrence depends on the dtype and device of q, which can differ between a
    # step and the run in which the call was found.
    of_model = {"dtype": known.get("dtype", recurrence.dtype), "device": options["device"]}
    q, v = (torch.empty(0, options[dim], **of_model) for dim in ("head_dim", "value_dim"))
    dtypes = {recurrence.dtype_of_products(q, v), known.get("dtype", recurrence.dtype)}
    return [options | {"dtype": dtype} for dtype in sorted(dtypes, key=str)]

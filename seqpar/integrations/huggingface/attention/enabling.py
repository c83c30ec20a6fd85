"""Everything that `enable` replaces in a model's attention, and in transformers.

`replace_attention` returns handles whose `remove` methods undo it. The guard stays: it makes every
transformers model refuse a sharded batch unless the model is enabled.
"""

from __future__ import annotations

from functools import partial, wraps
from inspect import BoundArguments, signature
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.core.torch_private import compiled_modules
from seqpar.integrations.huggingface.attention.attention import TEMPERED, attend, describe_mask
from seqpar.integrations.huggingface.attention.buckets import add_bucket_hooks
from seqpar.integrations.huggingface.attention.call import EnabledModel, ModelCall, current
from seqpar.integrations.huggingface.attention.multimodal import take_tokens
from seqpar.integrations.huggingface.attention.own_attention import has_slopes, trace_layers
from seqpar.integrations.huggingface.attention.recurrent import (
    check_recurrent,
    patch_recurrent_layers,
)
from seqpar.integrations.huggingface.batch.sharding import (
    KEY,
    Sharding,
    has_kept_ids,
    has_noted_tokens,
)
from seqpar.integrations.huggingface.model.code import has_buckets, is_formula, is_table, takes
from seqpar.integrations.huggingface.model.layers import configs_of, encoder_of, kind_of
from seqpar.integrations.huggingface.model.patched_globals import Removable, Replaced

_NAME = "seqpar"  # of the attention implementation, in configs
_SETTING = "_attn_implementation"  # of configs
_GROWING = ("dynamic", "longrope")  # rotary embeddings that depend on the longest position
_TEMPERATURE = "attn_temperature_tuning"  # attribute of Llama 4's attention
_GUARD = "_refuses_sharded_batches"  # attribute of the checked PreTrainedModel.__call__


def check_attention(session: EnabledModel, body: nn.Module) -> None:
    check_recurrent(session.layers, body)
    only_recurrent = all(kind_of(type(x)) is not None for x in session.layers)
    if not _takes_positions(body) and not only_recurrent:
        name = type(body).__name__
        raise ValueError(f"model must take position_ids: {name} counts positions on each rank")


def replace_attention(session: EnabledModel, body: Any) -> list[Removable]:
    """Make the model's layers call seqpar. Removing the returned handles undoes it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    guard_models()
    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, describe_mask)
    for module, layer in session.layers.items():
        layer.session, layer.comm = session, session.comm
        setattr(module, KEY, layer)
    if session.traces:
        # The public setter refuses models whose layers compute attention themselves.
        for config in configs_of(body):
            setattr(config, _SETTING, _NAME)
    else:
        body.set_attn_implementation(_NAME)
    handles: list[Removable] = [
        *_add_position_hooks(body, encoder_of(session.inner)),
        *add_bucket_hooks(body),
        *_replace_temperatures(session),
        *trace_layers(session),
        *patch_recurrent_layers(session, body),
    ]
    if body is not session.inner:
        handles.append(body.register_forward_pre_hook(take_tokens, with_kwargs=True))
    return handles


def guard_models() -> None:
    """Make all models check their calls' arguments, also compiled ones once torch has loaded."""
    from transformers import PreTrainedModel

    _guard(PreTrainedModel)
    if (compiled := compiled_modules()) is not None:
        _guard(compiled)


def _guard(kind: type[nn.Module]) -> None:
    call: Any = kind.__call__
    if hasattr(call, _GUARD):
        return

    @wraps(call)
    def checked(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(model, *args, **kwargs)
        if not _is_in_call(model):
            _refuse_sharded_batch(model, args, kwargs)
        try:
            return call(model, *args, **kwargs)
        except BaseException as interruption:
            session: EnabledModel | None = vars(model).get(KEY)
            if session is not None and not isinstance(interruption, Exception):
                session.abandon()  # torch runs the hooks that end a call after an Exception only
            raise

    setattr(checked, _GUARD, True)
    kind.__call__ = checked  # type: ignore[method-assign]


def _is_in_call(model: nn.Module) -> bool:
    """Return whether an enabled model is being called, and this model is a part of it."""
    call = current.call
    return call is not None and any(x is model for x in call.session.inner.modules())


def _refuse_sharded_batch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    from transformers import PreTrainedModel

    values = [*args, *kwargs.values()]
    sharded = isinstance(kwargs.get(KEY), Sharding) or any(map(has_noted_tokens, values))
    if not sharded and not any(map(has_kept_ids, values)):
        return
    model = next((x for x in module.modules() if isinstance(x, PreTrainedModel)), None)
    if model is None or (not sharded and _has_users_attention(model)):
        return
    if any(KEY in vars(x) for x in module.modules()):
        return  # the hooks of an enabled model check the call
    name = type(model).__name__
    way_out = "enable it with seqpar's huggingface.enable, or give it the whole batch"
    raise ValueError(
        f"model must be enabled by seqpar for a sharded batch, and this {name} is not: {way_out}"
    )


def _has_users_attention(model: Any) -> bool:
    from transformers import AttentionInterface

    function = AttentionInterface().get(getattr(model.config, _SETTING, None))
    return function is not None and not function.__module__.startswith("transformers.")


def _replace_temperatures(session: EnabledModel) -> list[Removable]:
    """Switch off the scales of Llama 4's layers without rotary positions: `attend` applies them."""
    handles: list[Removable] = []
    for x in session.layers:
        if getattr(x, _TEMPERATURE, False) and not getattr(x, "use_rope", True):
            handles += [Replaced(x, _TEMPERATURE, False), Replaced(x, TEMPERED, True)]
    return handles


def _takes_positions(model: nn.Module) -> bool:
    if takes(model, "position_ids"):
        return True
    kinds = is_table, is_formula, has_buckets, has_slopes
    return any(is_kind(x) for x in model.modules() for is_kind in kinds)


def _add_position_hooks(model: nn.Module, encoder: nn.Module | None) -> list[Removable]:
    """Give embeddings the positions of this rank's tokens, where a model counts its own."""
    inside = set() if encoder is None else set(encoder.modules())
    handles: list[Removable] = []
    for x in model.modules():
        if is_table(x):
            hook = partial(_give_positions, x in inside)
            handles.append(x.register_forward_pre_hook(hook, with_kwargs=True))
        if is_formula(x):
            handles.append(x.register_forward_hook(partial(_by_formula, x in inside)))
        kinds = getattr(x, "rope_type", None)
        kinds = list(kinds.values()) if isinstance(kinds, dict) else [kinds]
        if any(kind in _GROWING for kind in kinds):
            handles.append(x.register_forward_pre_hook(_append_last, with_kwargs=True))
            handles.append(x.register_forward_hook(_without_last))
    return handles


def _give_positions(
    in_encoder: bool, x: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    positions = _call().side(in_encoder).position_ids
    bound = _bound(x, args, kwargs)
    bound.arguments["position_ids"] = None if positions is None else positions[0]
    return bound.args[1:], bound.kwargs


def _by_formula(in_encoder: bool, x: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
    side = _call().side(in_encoder)
    if side.last_position >= len(x.weights):
        x.make_weights(side.last_position + 1, x.embedding_dim, x.padding_idx)
    return x.weights[side.position_ids].to(output)


def _append_last(x: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Append the greatest position of all ranks to this rank's positions."""
    last_position = _call().sharding.main.last_position
    bound = _bound(x, args, kwargs)
    positions = bound.arguments["position_ids"]
    last = positions.new_full((*positions.shape[:-1], 1), last_position)
    bound.arguments["position_ids"] = torch.cat([positions, last], -1)
    return bound.args[1:], bound.kwargs


def _without_last(x: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(part[..., :-1, :] for part in output)
    return output[..., :-1, :]


def _bound(x: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundArguments:
    return signature(type(x).forward).bind(x, *args, **kwargs)


def _call() -> ModelCall:
    call = current.call
    if call is None:
        reason = "they are computed outside of its call, or recomputed"
        raise ValueError(f"the model's embeddings of positions need its sharded batch: {reason}")
    return call

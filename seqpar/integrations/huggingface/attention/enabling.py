"""Everything that `enable` replaces in a model's attention and in transformers."""

from __future__ import annotations

from functools import partial
from inspect import BoundArguments, signature
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.integrations.huggingface.attention.attention import TEMPERED, attend, describe_mask
from seqpar.integrations.huggingface.attention.call import NAME, EnabledModel, ModelCall, current
from seqpar.integrations.huggingface.attention.multimodal import take_tokens
from seqpar.integrations.huggingface.attention.recurrent import (
    check_recurrent,
    patch_recurrent_layers,
)
from seqpar.integrations.huggingface.batch.sharding import KEY
from seqpar.integrations.huggingface.huggingface_private import attention_of, set_attention
from seqpar.integrations.huggingface.model.code import dispatches, global_of, takes
from seqpar.integrations.huggingface.model.layers import (
    configs_of,
    encoder_of,
    is_formula,
    is_table,
    kind_of,
)
from seqpar.integrations.huggingface.model.replaced import Removable, Replaced

_GROWING = ("dynamic", "longrope")  # rotary embeddings that depend on the longest position
_TEMPERATURE = "attn_temperature_tuning"  # attribute of Llama 4's attention


def check_attention(session: EnabledModel, body: nn.Module) -> None:
    for module, layer in session.layers.items():
        _check_functions(module, layer.name, body)
    check_recurrent(session.layers, body)
    only_recurrent = all(kind_of(type(x)) is not None for x in session.layers)
    if not _takes_positions(body) and not only_recurrent:
        name = type(body).__name__
        raise ValueError(f"model must take position_ids: {name} counts positions on each rank")


def _check_functions(module: nn.Module, layer: str, body: Any) -> None:
    """Raise a ValueError if transformers calls a user's function for a layer, or for its masks."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = attention_of(getattr(module, "config", body.config))
    functions = global_of(module, "ALL_ATTENTION_FUNCTIONS") or AttentionInterface()
    own = global_of(module, "eager_attention_forward")
    found = {"attention": functions.get(name, own), "masks": ALL_MASK_ATTENTION_FUNCTIONS.get(name)}
    for what, function in found.items():
        is_kernel = "/" in (
            name or ""
        )  # a kernel of the hub, which computes transformers' attention
        if name != NAME and not is_kernel and _is_users(function):
            given = getattr(function, "__qualname__", type(function).__name__)
            reason = f"{layer} has {name!r}, the function {given}, which seqpar would not call"
            how = "for the usual attention, call model.set_attn_implementation('sdpa') first"
            raise ValueError(f"model must have {what} of transformers: {reason}; {how}")


def _is_users(function: Any) -> bool:
    if function is None:
        return False
    while isinstance(function, partial):
        function = function.func
    # `__module__` of a wrapper is that of the wrapped function; its globals are those of its own
    # file.
    file = getattr(function, "__globals__", {}).get("__name__", "")
    return not file.startswith(("transformers.", "transformers_modules."))


def replace_attention(session: EnabledModel, body: Any) -> list[Removable]:
    """Make the model's layers call seqpar. The `remove` methods of the returned handles undo
    this.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, describe_mask)
    for module, layer in session.layers.items():
        layer.session, layer.comm = session, session.comm
        setattr(module, KEY, layer)
    body.set_attn_implementation(NAME)
    for module in session.layers:
        config = getattr(module, "config", body.config)
        # transformers does not change the config of a class whose source does not call
        # `get_interface`, such as Automodel's Llama.
        if dispatches(type(module)) and attention_of(config) != NAME:
            set_attention(config, NAME)
    session.configs = [x for x in configs_of(body) if attention_of(x) == NAME]
    handles: list[Removable] = [
        *_add_position_hooks(body, encoder_of(session.inner)),
        *_replace_temperatures(session),
        *patch_recurrent_layers(session, body),
    ]
    if body is not session.inner:
        handles.append(body.register_forward_pre_hook(take_tokens, with_kwargs=True))
    return handles


def _replace_temperatures(session: EnabledModel) -> list[Removable]:
    """Switch off the code of Llama 4's layers that scales queries. seqpar's attention scales
    them.
    """
    handles: list[Removable] = []
    for x in session.layers:
        if getattr(x, _TEMPERATURE, False) and not getattr(x, "use_rope", True):
            handles += [Replaced(x, _TEMPERATURE, False), Replaced(x, TEMPERED, True)]
    return handles


def _takes_positions(model: nn.Module) -> bool:
    if takes(model, "position_ids"):
        return True
    return any(is_table(x) or is_formula(x) for x in model.modules())


def _add_position_hooks(model: nn.Module, encoder: nn.Module | None) -> list[Removable]:
    """Pass the positions of this rank's tokens to embeddings that would otherwise count from 0."""
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
    """Append the greatest position of all ranks to the positions of this rank's tokens, in the
    arguments of a module.
    """
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

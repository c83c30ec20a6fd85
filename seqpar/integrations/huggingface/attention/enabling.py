"""Everything that `enable` replaces in a model's attention, and in transformers.

`replace_attention` returns handles whose `remove` methods undo it. The guard stays: it makes every
transformers model refuse a sharded batch unless the model is enabled.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any, Protocol

import torch
from torch import nn

from seqpar.core.torch_private import compiled_modules
from seqpar.integrations.huggingface.attention.attention import attend, describe_mask
from seqpar.integrations.huggingface.attention.buckets import add_bucket_hooks
from seqpar.integrations.huggingface.attention.call import EnabledModel, current
from seqpar.integrations.huggingface.attention.multimodal import take_tokens
from seqpar.integrations.huggingface.attention.own_attention import trace_layers
from seqpar.integrations.huggingface.attention.positions import add_hooks, takes_positions
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
from seqpar.integrations.huggingface.model.layers import configs_of, kind_of

_NAME = "seqpar"  # of the attention implementation, in configs
_SETTING = "_attn_implementation"  # of configs
_GUARD = "_refuses_sharded_batches"  # attribute of the checked PreTrainedModel.__call__


class Removable(Protocol):
    """A change of a model that can be undone."""

    def remove(self) -> None: ...


def check_attention(session: EnabledModel, body: nn.Module) -> None:
    check_recurrent(session.layers, body)
    only_recurrent = all(kind_of(type(x)) is not None for x in session.layers)
    if not takes_positions(body) and not only_recurrent:
        name = type(body).__name__
        raise ValueError(f"model must take position_ids: {name} counts positions on each rank")


def replace_attention(
    session: EnabledModel, body: Any, encoder: nn.Module | None, with_images: bool
) -> list[Removable]:
    """Make the model's layers call seqpar. Removing the returned handles undoes it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    guard_models()
    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, describe_mask)
    for module, layer in session.layers.items():
        layer.session = session
        setattr(module, KEY, layer)
    if session.traces:
        # The public setter refuses models whose layers compute attention themselves.
        configs: Iterator[Any] = configs_of(body)
        for config in configs:
            setattr(config, _SETTING, _NAME)
    else:
        body.set_attn_implementation(_NAME)
    handles: list[Removable] = [
        *add_hooks(body, encoder),
        *add_bucket_hooks(body),
        *trace_layers(session),
        *patch_recurrent_layers(session, body),
    ]
    if with_images:
        hook = take_tokens(session.comm)
        handles.append(body.register_forward_pre_hook(hook, with_kwargs=True))
    return handles


def forget_layers(session: EnabledModel) -> None:
    for module in session.layers:
        vars(module).pop(KEY, None)


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
        if not torch.compiler.is_compiling() and current.call is None:
            _refuse_sharded_batch(model, args, kwargs)
        return call(model, *args, **kwargs)

    setattr(checked, _GUARD, True)
    kind.__call__ = checked  # type: ignore[method-assign]


def _refuse_sharded_batch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise a ValueError if a model that is not enabled gets one rank's tokens."""
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

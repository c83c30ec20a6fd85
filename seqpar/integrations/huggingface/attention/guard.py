"""Refuse sharded batches in models that are not enabled: they would see one rank's tokens."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import nn

from seqpar.integrations.huggingface.attention.call import current
from seqpar.integrations.huggingface.batch.sharding import (
    KEY,
    Sharding,
    has_kept_ids,
    has_noted_tokens,
)

_SETTING = "_attn_implementation"  # of configs
_GUARDS = "_refuses_sharded_batches"  # of the function that checks


def guard_models() -> None:
    """Check what each model of transformers is called with from now on; again does nothing.

    A check looks at the arguments of a model's call, not of its layers.
    """
    from transformers import PreTrainedModel

    call: Any = PreTrainedModel.__call__
    if hasattr(call, _GUARDS):
        return

    @wraps(call)
    def checked(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and current.call is None:
            _check(model, args, kwargs)
        return call(model, *args, **kwargs)

    setattr(checked, _GUARDS, True)
    PreTrainedModel.__call__ = checked  # type: ignore[method-assign]


def _check(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise a ValueError if a model that is not enabled is given a rank's tokens.

    Copies of ids are known by their numbers, which are compared where the shape is the same.
    """
    given = [*args, *kwargs.values()]
    sharded = isinstance(kwargs.get(KEY), Sharding) or any(map(has_noted_tokens, given))
    if not sharded and (not any(map(has_kept_ids, given)) or _has_users_attention(model)):
        return
    if any(KEY in vars(x) for x in model.modules()):
        return  # its hooks check the call
    name = type(model).__name__
    way_out = "enable it with seqpar's huggingface.enable, or give it the whole batch"
    raise ValueError(
        f"model must be enabled by seqpar for a sharded batch, and this {name} is not: {way_out}"
    )


def _has_users_attention(model: Any) -> bool:
    """Return whether a user's own function computes attention, which may do so over ranks."""
    from transformers import AttentionInterface

    function = AttentionInterface().get(getattr(model.config, _SETTING, None))
    return function is not None and not function.__module__.startswith("transformers.")

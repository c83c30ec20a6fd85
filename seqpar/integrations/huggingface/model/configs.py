"""Separate config objects for an enabled model, and the search for the transformers model."""

from __future__ import annotations

import copy
from collections.abc import Collection
from importlib import import_module
from typing import Any

from torch import nn


class OwnConfigs:
    """Copies that replace configs, which models may share; those of `apart` are separate."""

    def __init__(self, model: nn.Module, apart: Collection[nn.Module] = ()) -> None:
        from transformers import PreTrainedConfig

        shared: dict[int, Any] = {}
        of_others: dict[int, Any] = {}
        self._replaced: list[tuple[nn.Module, str, Any, Any]] = []
        for x in model.modules():
            memo = of_others if x in apart else shared
            for name, config in list(vars(x).items()):
                if isinstance(config, PreTrainedConfig):
                    own = copy.deepcopy(config, memo)
                    self._replaced.append((x, name, config, own))
                    setattr(x, name, own)

    def restore(self) -> None:
        """Put the original configs back, and carry over changes that were made in the copies."""
        from transformers import PreTrainedConfig

        for x, name, config, own in self._replaced:
            if getattr(x, name) is own:
                setattr(x, name, config)
            for key, value in vars(own).items():
                changed = not isinstance(value, PreTrainedConfig) and "_implementation" not in key
                if changed and vars(config).get(key) != value:
                    setattr(config, key, value)


def require(package: str, user: str) -> None:
    """Raise an ImportError with pip's command if a package of the extra `hf` is missing."""
    try:
        import_module(package)
    except ImportError as error:
        command = "pip install 'seqpar[hf]'"
        raise ImportError(f"{user} needs {error.name or package}: {command}") from error


def inner_model(model: nn.Module) -> Any:
    require("transformers", "seqpar.integrations.huggingface")
    from transformers import PreTrainedModel

    if isinstance(model, nn.Module):
        for x in model.modules():
            if isinstance(x, PreTrainedModel):
                return x
    found = type(model).__name__
    raise ValueError(f"model must be or have a transformers.PreTrainedModel, got {found}")

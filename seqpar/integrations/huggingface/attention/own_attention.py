"""Layers that compute attention by themselves, whatever their config names, as those of Bloom."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.integrations.huggingface.attention.attention import NAME, attend, sides_of
from seqpar.integrations.huggingface.attention.call import Session, ShardedMask
from seqpar.integrations.huggingface.attention.masks import MaskShape
from seqpar.integrations.huggingface.attention.traced_scores import Bias, Noted, Recording, Scores
from seqpar.integrations.huggingface.model.code import computes_itself
from seqpar.integrations.huggingface.model.layers import AttentionLayer, configs_of

_SETTING = "_attn_implementation"  # of configs, whose public setter refuses these models
_SLOPED = "alibi", "position_bias"  # arguments that have the bias of ALiBi
_OTHERS = "encoder_hidden_states", "key_value_states"  # that keys are made of
_MAKERS = "build_alibi_tensor", "build_mpt_alibi_tensor"  # of it, in the files of models


class OwnForward:
    """The forward of a layer that computes attention by itself, recorded until it is removed."""

    def __init__(self, module: Any, layer: AttentionLayer, session: Session) -> None:
        self._module, self._layer, self._session = module, layer, session
        self._forward, self._known = module.forward, vars(module).get("forward")
        self._signature = inspect.signature(module.forward)
        self._bands = {
            name: band for name, x in module.named_buffers() if (band := band_of(x)) is not None
        }
        self._slopes = slopes_of(module)
        module.forward = self

    def remove(self) -> None:
        """Give the layer its forward back."""
        vars(self._module).pop("forward", None)
        if self._known is not None:
            self._module.forward = self._known

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer's forward does, with attention over all ranks."""
        bound = self._signature.bind(*args, **kwargs)
        device = next(x.device for x in bound.arguments.values() if isinstance(x, Tensor))
        for name, value in bound.arguments.items():
            if isinstance(value, ShardedMask):
                bound.arguments[name] = Bias(self._like(value), device, mask=value)
            elif name in _SLOPED and value is not None and self._slopes is not None:
                slopes = self._slopes.to(device)
                bound.arguments[name] = Bias(value.to("meta"), device, slopes=slopes)
        bands = {id(getattr(self._module, name)): band for name, band in self._bands.items()}
        raised: list[Exception] = []  # on all ranks already
        attended: list[Scores] = []

        def attend_recorded(scores: Scores, value: Tensor) -> Tensor:
            attended.append(scores)
            try:
                return _attend(self._module, scores, value)
            except (ValueError, TypeError) as fault:
                raised.append(fault)
                raise

        others = any(bound.arguments.get(name) is not None for name in _OTHERS)
        try:
            if others and not self._layer.cross:
                raise ValueError("it attends to states of another model, which no rank has cut")
            with Recording(attend_recorded, bands):
                found = self._forward(*bound.args, **bound.kwargs)
            if len(attended) != 1:
                raise ValueError(f"it computes attention {len(attended)} times that can be seen")
        except (ValueError, TypeError) as fault:
            if fault in raised:
                raise
            with self._session.faults(self._layer.name):
                raise
        return _without_scores(found)

    def _like(self, mask: ShardedMask) -> Tensor:
        side, _, rows = sides_of(mask.call, self._layer)
        return torch.empty(1, 1, side.tokens, rows, device="meta")


def record(session: Session) -> list[OwnForward]:
    """Record the layers of a session that compute attention by themselves."""
    return [OwnForward(x, layer, session) for x, layer in own(session.layers)]


def own(layers: dict[nn.Module, AttentionLayer]) -> list[tuple[nn.Module, AttentionLayer]]:
    """Return the layers that compute attention by themselves."""
    return [(x, layer) for x, layer in layers.items() if computes_itself(type(x))]


def _attend(module: nn.Module, scores: Scores, v: Tensor) -> Tensor:
    """Return (…, T, Dv): attention with what became of the scores, in the layer's own shape."""
    q, k, v = (x if x.dim() == 4 else x[None] for x in (scores.q, scores.k, v))
    out, _ = attend(
        module,
        q.to(v.dtype),
        k.to(v.dtype),
        v,
        scores.mask,
        scaling=scores.scale,
        is_causal=False,
        band=scores.band,
        alibi_slopes=scores.slopes,
    )
    return out.transpose(1, 2).reshape(*scores.like.shape[:-1], v.shape[-1])


def _without_scores(found: Any) -> Any:
    """Return a layer's outputs, without weights that nobody has."""
    if isinstance(found, tuple | list):
        return type(found)(_without_scores(x) for x in found)
    return None if isinstance(found, Noted) else found


def band_of(x: Tensor) -> MaskShape | None:
    """Return the causal mask that a layer has as a tensor (1, 1, N, N) of ones and zeros, if so."""
    if x.dim() != 4 or x.shape[2] != x.shape[3] or x.shape[:2] != (1, 1) or not x.numel():
        return None
    width = int(x[0, 0, -1].count_nonzero())
    seen = torch.ones_like(x, dtype=torch.bool).tril()
    if not torch.equal(x.bool(), seen ^ seen.tril(-width)):
        return None
    return MaskShape(causal=True, left=-1 if width == len(x[0, 0]) else width - 1)


def has_slopes(x: nn.Module) -> bool:
    """Return whether a module is an attention layer with the bias of ALiBi."""
    return computes_itself(type(x)) and slopes_of(x) is not None


def slopes_of(layer: Any) -> Tensor | None:
    """Return how much the bias of ALiBi adds for a position more, (H,) fp32, if a layer has one."""
    heads = getattr(layer, "num_heads", None) or getattr(layer, "n_heads", None)
    for name in _MAKERS:
        if make := getattr(sys.modules[type(layer).__module__], name, None):
            two = torch.ones(1, 2, dtype=torch.long)
            bias = make(two, heads, torch.float32) if name == _MAKERS[0] else make(heads, 2)
            first, second = bias.view(heads, 2).unbind(1)
            return second - first
    return None


def set_implementation(model: Any, records: bool) -> None:
    """Name seqpar in a model's configs: of layers that compute themselves it makes their masks."""
    if not records:
        model.set_attn_implementation(NAME)
    configs: Iterator[Any] = configs_of(model)
    for config in configs if records else ():
        setattr(config, _SETTING, NAME)

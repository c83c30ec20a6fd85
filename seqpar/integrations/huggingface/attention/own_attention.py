"""Layers that compute attention themselves, whatever their config names, such as Bloom's.

While such a layer's own forward runs, a product of two activations is a `Scores` object, which
records scales, masks, ALiBi's bias and the softmax instead of computing them. Where the weights
meet the values, seqpar's attention is called. Any step that is not understood is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seqpar.integrations.huggingface.attention.attention import attend, sides_of
from seqpar.integrations.huggingface.attention.call import EnabledModel, ShardedMask
from seqpar.integrations.huggingface.attention.masks import MaskShape
from seqpar.integrations.huggingface.model.code import computes_itself, global_of
from seqpar.integrations.huggingface.model.layers import AttentionLayer
from seqpar.integrations.huggingface.model.patched_globals import Replaced

_MASKED_SCORE = -1e4  # scores at or below this mean that the key is hidden
_CASTS = {"contiguous", "float", "half", "to", "type", "type_as"}
_SHAPES = {"expand_as", "flatten", "reshape", "unsqueeze", "view"}
_PRODUCTS = {"baddbmm", "bmm", "matmul"}
_NAMES = {"iadd": "add", "imul": "mul", "itruediv": "div", "truediv": "div", "maximum": "max"}


def _operator(name: str) -> Callable[[Noted, Any], Any]:
    return lambda self, other: _note(name, (self, other), {})


@dataclass(eq=False, kw_only=True)
class Noted:
    """A stand-in for a tensor, which records the torch functions that are applied to it."""

    like: Tensor  # a meta tensor of the same shape and dtype
    device: torch.device
    mask: Any = None
    band: MaskShape | None = None  # the causal mask that a layer makes itself
    slopes: Tensor | None = None  # (H,), ALiBi's

    def __getattr__(self, name: str) -> Any:
        if name in ("dim", "dtype", "ndim", "shape", "size"):
            return getattr(self.like, name)
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: _note(name, (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _note(func.__name__, args, kwargs or {})

    __add__ = __radd__ = _operator("add")
    __mul__ = __rmul__ = _operator("mul")
    __truediv__ = _operator("div")
    __rsub__ = _operator("rsub")
    __matmul__ = _operator("matmul")
    __getitem__ = _operator("getitem")


@dataclass(eq=False, kw_only=True)
class Bias(Noted):
    """A term that layers add to scores: a mask, their own causal band, or ALiBi's `slopes`."""

    def noted(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if name == "baddbmm":  # called as a method; the recording must see the function
            named = dict(kwargs)
            batches = args[1:] or (named.pop("batch1"), named.pop("batch2"))
            return torch.baddbmm(self, *batches, **named)  # type: ignore[call-overload]
        if name in _CASTS | _SHAPES or name == "getitem":
            return self
        if self.slopes is not None and name in ("div", "mul"):
            return replace(self, slopes=self.slopes * _factor(name, args[1]))
        if self.slopes is None and name in ("mul", "rsub"):  # ones and zeros that hide keys
            return self
        raise _refusal(name, "its mask or bias")


@dataclass(eq=False, kw_only=True)
class Scores(Noted):
    """Scores of q (…, T, D) and k (…, Tk, D) times `scale`; after the softmax, `weights`."""

    attend: Callable[[Scores, Tensor], Tensor]
    q: Tensor
    k: Tensor
    scale: float = 1.0
    weights: bool = False

    def noted(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        other = args[1] if len(args) > 1 else None
        if name in ("expand_as", "type_as") and args[0] is not self:
            like = args[0].new_empty((), dtype=self.dtype).expand(self.shape)
            return getattr(args[0], name)(like)
        if name in _CASTS:
            return self
        if name in _SHAPES:
            others = [x.like if isinstance(x, Noted) else x for x in args[1:]]
            return replace(self, like=getattr(self.like, name)(*others, **kwargs))
        if name == "dropout":
            if kwargs.get("training", True) and (p := kwargs.get("p", 0.5)):
                raise ValueError(f"dropout is {p}, and attention over sharded keys has no dropout")
            return self
        if self.weights:
            if name in ("bmm", "matmul") and args[0] is self and isinstance(other, Tensor):
                return self.attend(self, other)
            raise _refusal(name, "its weights")
        if name in ("add", "masked_fill") and isinstance(other, Tensor):
            found = f"a tensor {tuple(other.shape)} that the model made itself"
            raise ValueError(f"its mask or bias is {found}")
        if name == "softmax" and kwargs.get("dim", other) in (-1, self.like.dim() - 1):
            return replace(self, weights=True)
        if name in ("div", "mul") and not isinstance(other, Noted):
            return self.scaled(_factor(name, other))
        if name in ("add", "mul") and isinstance(other, Bias):
            return self.biased(other)
        if name == "masked_fill" and isinstance(other, Bias) and _leaves_out(args[2]):
            return self.biased(other)
        if name == "max" and _leaves_out(other):
            return self
        raise _refusal(name, "its scores")

    def scaled(self, by: float) -> Scores:
        slopes = None if self.slopes is None else self.slopes * by
        return replace(self, scale=self.scale * by, slopes=slopes)

    def biased(self, by: Bias) -> Scores:
        found = {}
        for name in ("mask", "band", "slopes"):
            known, new = getattr(self, name), getattr(by, name)
            if known is not None and new is not None and known is not new:
                raise ValueError(f"its scores have two biases of one kind: {name}")
            found[name] = known if new is None else new
        return replace(self, **found)


class Recording(TorchFunctionMode):
    """A context in which products of activations are `Scores`. `bands` has tensor masks by `id`."""

    def __init__(
        self, attend: Callable[[Scores, Tensor], Tensor], bands: Mapping[int, MaskShape]
    ) -> None:
        super().__init__()
        self._attend, self._bands = attend, bands

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, _name(func.__name__)
        if name == "getitem" and id(args[0]) in self._bands:
            part = func(*args)
            return Bias(like=part.to("meta"), device=part.device, band=self._bands[id(args[0])])
        if name == "zeros":  # zero scores; baddbmm adds products to them
            return func((), **kwargs).expand(*args)
        if name in _PRODUCTS and not any(isinstance(x, Scores) for x in args):
            start, q, k = args if name == "baddbmm" else (None, *args)
            if q.dim() > 2 and k.dim() > 2:
                return self._product(start, q, k, **kwargs)
        return func(*args, **kwargs)

    def _product(
        self, start: Any, q: Tensor, k: Tensor, beta: float = 1.0, alpha: float = 1.0
    ) -> Scores:
        """Return q (…, T, D) · k (…, D, Tk) · alpha + start · beta."""
        like = q.new_empty((*q.shape[:-1], k.shape[-1]), device="meta")
        k = k.transpose(-1, -2)
        scores = Scores(like=like, device=q.device, attend=self._attend, q=q, k=k).scaled(alpha)
        if isinstance(start, Bias):
            return scores.biased(start * beta)
        if start is not None and (any(start.stride()) or start.flatten()[:1].any()):
            raise _refusal("baddbmm", "its scores")
        return scores


def _name(name: str) -> str:
    name = name.strip("_")
    return _NAMES.get(name, name)


def _note(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    name = _name(name)
    if name == "where" and isinstance(args[0], Bias) and _leaves_out(args[2]):
        name, args = "masked_fill", (args[1], args[0], args[2])
    for kind in (Scores, Bias):
        for i, x in enumerate(args):
            if isinstance(x, kind):
                if i and name in ("add", "mul"):
                    args = (x, *args[:i], *args[i + 1 :])
                return x.noted(name, args, kwargs)
    raise _refusal(name, "its scores")


def _factor(name: str, x: Any) -> float:
    """Return the factor of "mul", or of "div", by a number."""
    constant = isinstance(x, Tensor) and x.numel() == 1 and not x.requires_grad
    if not constant and not (isinstance(x, int | float) and x):
        raise ValueError("it multiplies its scores by something other than a number")
    return float(x) if name == "mul" else 1 / float(x)


def _leaves_out(x: Any) -> bool:
    """Return whether a number is so low that keys with this score have no weight."""
    if isinstance(x, Tensor) and x.numel() != 1:
        return False
    return isinstance(x, int | float | Tensor) and float(x) <= _MASKED_SCORE


def _refusal(name: str, what: str) -> ValueError:
    return ValueError(f"it applies {name} to {what}, which is not understood here")


_SLOPED = "alibi", "position_bias"  # arguments that hold ALiBi's bias
_OTHERS = "encoder_hidden_states", "key_value_states"  # arguments that keys are computed from
_MAKERS = "build_alibi_tensor", "build_mpt_alibi_tensor"  # functions that make ALiBi's bias


class OwnForward(Replaced):
    """The traced forward of a layer that computes attention itself, in place until `remove`."""

    def __init__(self, module: Any, layer: AttentionLayer, session: EnabledModel) -> None:
        self._layer, self._session, self._forward = layer, session, module.forward
        self._signature = inspect.signature(module.forward)
        bands = {name: band_of(x) for name, x in module.named_buffers()}
        self._bands = {name: band for name, band in bands.items() if band is not None}
        self._slopes = slopes_of(module)
        super().__init__(module, "forward", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        device = next(x.device for x in bound.arguments.values() if isinstance(x, Tensor))
        for name, value in bound.arguments.items():
            if isinstance(value, ShardedMask):
                side, _, rows = sides_of(value.call, self._layer)
                like = torch.empty(1, 1, side.tokens, rows, device="meta")
                bound.arguments[name] = Bias(like=like, device=device, mask=value)
            elif name in _SLOPED and value is not None and self._slopes is not None:
                like, slopes = value.to("meta"), self._slopes.to(device)
                bound.arguments[name] = Bias(like=like, device=device, slopes=slopes)
        bands = {id(getattr(self._module, name)): band for name, band in self._bands.items()}
        raised: list[Exception] = []  # errors that all ranks have raised already
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


def trace_layers(session: EnabledModel) -> list[OwnForward]:
    layers = session.layers.items()
    return [OwnForward(x, layer, session) for x, layer in layers if computes_itself(type(x))]


def _attend(module: nn.Module, scores: Scores, v: Tensor) -> Tensor:
    """Return attention (…, T, Dv) of the recorded scores, in the layer's own shape."""
    q, k, v = (x if x.dim() == 4 else x[None] for x in (scores.q, scores.k, v))
    options = {"scaling": scores.scale, "band": scores.band, "alibi_slopes": scores.slopes}
    q, k = q.to(v.dtype), k.to(v.dtype)
    out, _ = attend(module, q, k, v, scores.mask, is_causal=False, **options)
    return out.transpose(1, 2).reshape(*scores.like.shape[:-1], v.shape[-1])


def _without_scores(found: Any) -> Any:
    """Return a layer's outputs with None in place of the weights, which no rank has."""
    if isinstance(found, tuple | list):
        return type(found)(_without_scores(x) for x in found)
    return None if isinstance(found, Noted) else found


def band_of(x: Tensor) -> MaskShape | None:
    """Return the causal mask that a tensor (1, 1, N, N) of ones and zeros holds, or None."""
    if x.dim() != 4 or x.shape[2] != x.shape[3] or x.shape[:2] != (1, 1) or not x.numel():
        return None
    width = int(x[0, 0, -1].count_nonzero())
    seen = torch.ones_like(x, dtype=torch.bool).tril()
    if not torch.equal(x.bool(), seen ^ seen.tril(-width)):
        return None
    return MaskShape(causal=True, left=-1 if width == len(x[0, 0]) else width - 1)


def has_slopes(x: nn.Module) -> bool:
    return computes_itself(type(x)) and slopes_of(x) is not None


def slopes_of(layer: Any) -> Tensor | None:
    """Return ALiBi's slopes (H,) fp32 of a layer, the bias per position; None without ALiBi."""
    heads = getattr(layer, "num_heads", None) or getattr(layer, "n_heads", None)
    for name in _MAKERS:
        if make := global_of(layer, name):
            two = torch.ones(1, 2, dtype=torch.long)
            bias = make(two, heads, torch.float32) if name == _MAKERS[0] else make(heads, 2)
            first, second = bias.view(heads, 2).unbind(1)
            return second - first
    return None

"""Attention of layers that compute it by themselves: what they do to scores is noted, not done.

Such a layer multiplies queries and keys, scales the scores, adds its mask or the bias of ALiBi,
takes the softmax and multiplies the weights by the values. While its own forward runs, a product of
two activations is a `Scores`, which notes what becomes of it. Where the weights meet the values,
seqpar's attention is called instead. What is not understood is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from seqpar.integrations.huggingface.attention.masks import MaskShape

_MASKED_SCORE = -1e4  # scores at or below this mean that the key is hidden
_CASTS = {"contiguous", "float", "half", "to", "type", "type_as"}
_SHAPES = {"expand_as", "flatten", "reshape", "unsqueeze", "view"}
_PRODUCTS = {"baddbmm", "bmm", "matmul"}
_NAMES = {"iadd": "add", "imul": "mul", "itruediv": "div", "truediv": "div", "maximum": "max"}


class Noted:
    """What is no tensor, and notes what torch's functions do with it."""

    like: Tensor  # on the meta device, of its shape and dtype
    device: torch.device

    def __getattr__(self, name: str) -> Any:
        if name in ("dim", "dtype", "ndim", "shape", "size"):
            return getattr(self.like, name)
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: _note(name, (self, *args), kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note one of torch's functions."""
        return _note(func.__name__, args, kwargs or {})

    def __add__(self, other: Any) -> Any:
        return _note("add", (self, other), {})

    def __mul__(self, other: Any) -> Any:
        return _note("mul", (self, other), {})

    def __truediv__(self, other: Any) -> Any:
        return _note("div", (self, other), {})

    def __rsub__(self, other: Any) -> Any:
        return _note("rsub", (self, other), {})

    def __matmul__(self, other: Any) -> Any:
        return _note("matmul", (self, other), {})

    def __getitem__(self, index: Any) -> Any:
        return _note("getitem", (self, index), {})

    __radd__, __rmul__ = __add__, __mul__


@dataclass(eq=False)
class Bias(Noted):
    """What layers add to scores: a mask, a causal band of theirs, or `slopes` (H,) of ALiBi."""

    like: Tensor
    device: torch.device
    mask: Any = None
    band: MaskShape | None = None
    slopes: Tensor | None = None

    def noted(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what a function makes of this."""
        if name == "baddbmm":  # a method here, which the recording has to see
            named = dict(kwargs)
            batches = args[1:] or (named.pop("batch1"), named.pop("batch2"))
            return torch.baddbmm(self, *batches, **named)  # type: ignore[call-overload]
        if name in _CASTS | _SHAPES or name == "getitem":
            return self
        if self.slopes is not None and name in ("div", "mul"):
            by = _number(args[1])
            return replace(self, slopes=self.slopes * (by if name == "mul" else 1 / by))
        if self.slopes is None and name in ("mul", "rsub"):  # ones and zeros, to leave keys out
            return self
        raise _refusal(name, "its mask or bias")


@dataclass(eq=False)
class Scores(Noted):
    """The scores of a layer's queries and keys, and behind the softmax their `weights`.

    `q` (…, T, D) and `k` (…, Tk, D) are the layer's; their products are multiplied by `scale`.
    """

    like: Tensor
    device: torch.device
    attend: Callable[[Scores, Tensor], Tensor]
    q: Tensor
    k: Tensor
    scale: float = 1.0
    mask: Any = None
    band: MaskShape | None = None
    slopes: Tensor | None = None
    weights: bool = False

    def noted(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what a function makes of this."""
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
                raise ValueError(f"dropout is {p}, and over sharded keys there is none")
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
            by = _number(other)
            return self.scaled(by if name == "mul" else 1 / by)
        if name in ("add", "mul") and isinstance(other, Bias):
            return self.biased(other)
        if name == "masked_fill" and isinstance(other, Bias) and _leaves_out(args[2]):
            return self.biased(other)
        if name == "max" and _leaves_out(other):
            return self
        raise _refusal(name, "its scores")

    def scaled(self, by: float) -> Scores:
        """Return these scores, multiplied by a number."""
        slopes = None if self.slopes is None else self.slopes * by
        return replace(self, scale=self.scale * by, slopes=slopes)

    def biased(self, by: Bias) -> Scores:
        """Return these scores with a bias."""
        found = {}
        for name in ("mask", "band", "slopes"):
            known, new = getattr(self, name), getattr(by, name)
            if known is not None and new is not None and known is not new:
                raise ValueError(f"its scores have two biases of one kind: {name}")
            found[name] = known if new is None else new
        return replace(self, **found)


class Recording(TorchFunctionMode):
    """While this is entered, products of activations are `Scores`, which `attend` computes.

    `bands` are masks that the layer has as tensors, by their `id`.
    """

    def __init__(
        self, attend: Callable[[Scores, Tensor], Tensor], bands: Mapping[int, MaskShape]
    ) -> None:
        super().__init__()
        self._attend, self._bands = attend, bands

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note products, and parts of bands; call all other functions."""
        kwargs, name = kwargs or {}, _name(func.__name__)
        if name == "getitem" and id(args[0]) in self._bands:
            part = func(*args)
            return Bias(part.to("meta"), part.device, band=self._bands[id(args[0])])
        if name == "zeros":  # of all scores, to add products to them
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
        scores = Scores(like, q.device, self._attend, q, k.transpose(-1, -2)).scaled(alpha)
        if isinstance(start, Bias):
            return scores.biased(start * beta)
        if start is not None and (any(start.stride()) or start.flatten()[:1].any()):
            raise _refusal("baddbmm", "its scores")
        return scores


def _name(name: str) -> str:
    name = name.strip("_")
    return _NAMES.get(name, name)


def _note(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what a function makes of scores or biases."""
    name = _name(name)
    if name == "where" and isinstance(args[0], Bias) and _leaves_out(args[2]):
        name, args = "masked_fill", (args[1], args[0], args[2])
    for kind in (Scores, Bias):
        for i, x in enumerate(args):
            if isinstance(x, kind):
                if i and name in ("add", "mul"):
                    args = (x, *args[:i], *args[i + 1 :])
                noted: Any = x.noted(name, args, kwargs)
                return noted
    raise _refusal(name, "its scores")


def _number(x: Any) -> float:
    """Return the number by which scores are multiplied."""
    if isinstance(x, Tensor) and x.numel() == 1 and not x.requires_grad:
        return float(x)
    if isinstance(x, int | float) and x:
        return float(x)
    raise ValueError("it multiplies its scores by what is no number")


def _leaves_out(x: Any) -> bool:
    """Return whether a number is so low that keys with this score have no weight."""
    if isinstance(x, Tensor) and x.numel() != 1:
        return False
    return isinstance(x, int | float | Tensor) and float(x) <= _MASKED_SCORE


def _refusal(name: str, what: str) -> ValueError:
    return ValueError(f"it applies {name} to {what}, which is not understood here")

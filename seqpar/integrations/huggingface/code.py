"""What a layer's code says of its attention: models are known by their code, not their names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache
from types import FunctionType

from torch import nn

ATTENTION = re.compile(r"Attention|Attn(?!_)")
_DROPOUT = re.compile(r"dropout=0\.0 if not self\.training else self\.([\w.]+)")
_OWN_DROPOUT = re.compile(  # of weights, in layers that compute them
    r"self\.(\w*dropout)\((?:\w*(?:attn|attention)_(?:probs|weights|scores)|w)\)"
    r"|dropout\(\w*weights, p=self\.(\w+)"
)
_SOFTMAX = re.compile(r"[sS]oftmax\(")
_PRODUCT = re.compile(r"(?:matmul\w*|bmm)\(| @ ")
_OTHER_MIXING = re.compile(r"einsum|\.conv\dd\(|IntSoftmax")


def _functions(kind: type) -> Iterator[FunctionType]:
    """Return the functions of a module's class, without their decorators."""
    for base in kind.__mro__:
        if issubclass(base, nn.Module) and not base.__module__.startswith("torch."):
            for x in vars(base).values():
                function = inspect.unwrap(x) if callable(x) else None
                if isinstance(function, FunctionType):
                    yield function


@cache
def _source(function: FunctionType) -> str:
    """Return a function's text, if there is any."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def dispatches(kind: type) -> bool:
    """Return whether a class of modules calls the attention function that its config names."""
    if hasattr(kind, "base_model_prefix"):  # a whole model
        return False
    return any("get_interface" in x.__code__.co_names for x in _functions(kind))


def computes_itself(kind: type) -> bool:
    """Return whether a class of modules multiplies queries and keys itself, as can be recorded.

    It has two products for each softmax, and nothing else that mixes tokens.
    """
    if hasattr(kind, "base_model_prefix") or not ATTENTION.search(kind.__name__):
        return False
    text = "\n".join(_source(x) for x in _functions(kind))
    softmaxes = len(_SOFTMAX.findall(text))
    products = len(_PRODUCT.findall(text))
    paired = softmaxes > 0 and products in (2, 2 * softmaxes)
    return paired and not dispatches(kind) and not _OTHER_MIXING.search(text)


def dropout_of(layer: nn.Module) -> float:
    """Return the probability of dropout that an attention layer passes on in training."""
    for function in _functions(type(layer)):
        if found := _DROPOUT.search(_source(function)):
            value: object = layer
            for part in found[1].split("."):
                value = getattr(value, part, 0.0)
            return float(value) if isinstance(value, int | float) else 0.0
    if computes_itself(type(layer)):
        text = "\n".join(_source(x) for x in _functions(type(layer)))
        for found in _OWN_DROPOUT.finditer(text):
            own = getattr(layer, found[1] or found[2])
            return float(own.p if isinstance(own, nn.Dropout) else own)
    return 0.0


def read_elsewhere(kind: type) -> set[str]:
    """Return the attributes of the layer that its file's own attention function reads."""
    own = getattr(inspect.getmodule(kind), "eager_attention_forward", None)
    if own is None or own.__module__ != kind.__module__:
        return set()
    read = set(re.findall(r"\bmodule\.(\w+)", _source(own)))
    if any("s_aux=self.sinks" in _source(x) for x in _functions(kind)):
        read.discard("sinks")
    return read

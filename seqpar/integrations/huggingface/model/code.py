"""Properties of layers that are read from their source code.

Models are recognised by their code, not by their names, so new families work without a table. All
functions take a class of modules, or a module, and read its Python source.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import threading
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType

from torch import nn

ATTENTION = re.compile(r"Attention|Attn(?!_)")
_DROPOUT = re.compile(r"dropout=0\.0 if not self\.training else self\.([\w.]+)")
_OWN_DROPOUT = re.compile(  # of attention weights, in layers that compute attention themselves
    r"self\.(\w*dropout)\((?:\w*(?:attn|attention)_(?:probs|weights|scores)|w)\)"
    r"|dropout\(\w*weights, p=self\.(\w+)"
)
_SOFTMAX = re.compile(r"[sS]oftmax\(")
_PRODUCT = re.compile(r"(?:matmul\w*|bmm)\(| @ ")
_OTHER_MIXING = re.compile(r"einsum|\.conv\dd\(|IntSoftmax")


_CAUSAL_MASK = re.compile(r"create_(?!bidirectional|recurrent)\w*mask")


def _functions(kind: type) -> Iterator[FunctionType]:
    for base in kind.__mro__:
        if issubclass(base, nn.Module) and not base.__module__.startswith("torch."):
            for x in vars(base).values():
                function = inspect.unwrap(x) if callable(x) else None
                if isinstance(function, FunctionType):
                    yield function


# CPython 3.11 raises a SystemError if two threads make syntax trees simultaneously.
_PARSING = threading.Lock()


@cache
def _source(function: FunctionType) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def dispatches(kind: type) -> bool:
    """Return whether a class calls the attention function that its model's config names."""
    if hasattr(kind, "base_model_prefix"):  # a whole model
        return False
    return any("get_interface" in x.__code__.co_names for x in _functions(kind))


def computes_itself(kind: type) -> bool:
    """Return whether a class multiplies queries and keys itself, in a way that can be traced.

    Such code has two products for each softmax, and nothing else that mixes tokens.
    """
    if hasattr(kind, "base_model_prefix") or not ATTENTION.search(kind.__name__):
        return False
    text = "\n".join(_source(x) for x in _functions(kind))
    softmaxes = len(_SOFTMAX.findall(text))
    products = len(_PRODUCT.findall(text))
    paired = softmaxes > 0 and products in (2, 2 * softmaxes)
    return paired and not dispatches(kind) and not _OTHER_MIXING.search(text)


def dropout_of(layer: nn.Module) -> float:
    """Return the dropout probability of an attention layer's weights in training."""
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
    """Return the layer's attributes that its file's own attention function reads."""
    own = getattr(inspect.getmodule(kind), "eager_attention_forward", None)
    if own is None or own.__module__ != kind.__module__:
        return set()
    read = set(re.findall(r"\bmodule\.(\w+)", _source(own)))
    if any("s_aux=self.sinks" in _source(x) for x in _functions(kind)):
        read.discard("sinks")
    return read


def masks_padding_tokens(kind: type) -> bool:
    """Return whether a class derives its mask from padding tokens when it gets none."""
    return any("make_default_2d_attention_mask" in x.__code__.co_names for x in _functions(kind))


def columns_of(kind: type) -> bool:
    """Return whether a forward numbers columns from 0 when it gets no position ids."""
    source = _source(inspect.unwrap(kind.forward))  # type: ignore[attr-defined]
    return re.search(r"position_ids = torch\.arange", source) is not None


@cache
def cuts_documents(kind: type) -> bool:
    """Return whether a class makes masks, and so documents, of jumps in position ids."""
    # Reading the source of every function takes longer than all else when a model is enabled.
    makers = (x for x in _functions(kind) if any(map(_CAUSAL_MASK.search, _names(x.__code__))))
    return any(_passes_positions(_source(x)) for x in makers)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that code uses, also in functions within it."""
    yield from code.co_names
    yield from code.co_varnames
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from _names(x)


def _passes_positions(source: str) -> bool:
    with _PARSING:
        tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        arguments: dict[object, ast.expr] = {}
        if isinstance(node, ast.Call):
            arguments = {x.arg: x.value for x in node.keywords}
        elif isinstance(node, ast.Dict):  # arguments that several masks share
            keys = [x.value for x in node.keys if isinstance(x, ast.Constant)]
            arguments = dict(zip(keys, node.values, strict=False))
        positions = arguments.get("position_ids")
        makes_mask = {"config", "attention_mask"} <= arguments.keys()
        if makes_mask and positions is not None and not isinstance(positions, ast.Constant):
            return True
    return False


_BUCKETS = (
    "_relative_position_bucket", "compute_bias", "has_relative_attention_bias", "is_decoder",
    "n_heads", "relative_attention_max_distance",
)  # fmt: skip


def has_buckets(x: nn.Module) -> bool:
    return all(hasattr(x, name) for name in _BUCKETS)

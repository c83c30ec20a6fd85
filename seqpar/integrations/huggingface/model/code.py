"""Properties of models that are read from their code, and the positions that they give to tokens.

Models are recognised by their code, not by their names, so new families work without a table.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

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
_COUNTS_COLUMNS = re.compile(r"position_ids = torch\.arange")  # from 0, without position ids
_NUMBERING = "create_position_ids_from_input_ids"
_BUCKETS = (
    "_relative_position_bucket", "compute_bias", "has_relative_attention_bias", "is_decoder",
    "n_heads", "relative_attention_max_distance",
)  # fmt: skip
# CPython 3.11 raises a SystemError if two threads make syntax trees simultaneously.
_PARSING = threading.Lock()


def _functions(kind: type) -> Iterator[FunctionType]:
    for base in kind.__mro__:
        if issubclass(base, nn.Module) and not base.__module__.startswith("torch."):
            for x in vars(base).values():
                function = inspect.unwrap(x) if callable(x) else None
                if isinstance(function, FunctionType):
                    yield function


@cache
def _source(function: FunctionType) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def _text_of(kind: type) -> str:
    return "\n".join(map(_source, _functions(kind)))


def global_of(x: object, name: str) -> Any:
    """Return a global of the file in which an object's class is, or None."""
    return getattr(sys.modules[type(x).__module__], name, None)


def takes(x: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(type(x).forward).parameters


def dispatches(kind: type) -> bool:
    """Return whether a class calls the attention function that its model's config names."""
    if hasattr(kind, "base_model_prefix"):  # a whole model
        return False
    return any("get_interface" in x.__code__.co_names for x in _functions(kind))


def computes_itself(kind: type) -> bool:
    """Return whether a class multiplies queries and keys itself, in a way that can be traced."""
    if hasattr(kind, "base_model_prefix") or not ATTENTION.search(kind.__name__):
        return False
    text = _text_of(kind)
    softmaxes, products = (len(x.findall(text)) for x in (_SOFTMAX, _PRODUCT))
    # Such code has two products for each softmax, and nothing else that mixes tokens.
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
    if computes_itself(type(layer)) and (found := _OWN_DROPOUT.search(_text_of(type(layer)))):
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


def has_buckets(x: nn.Module) -> bool:
    return all(hasattr(x, name) for name in _BUCKETS)


def default_positions(model: nn.Module, batch: dict[str, Any], rows: int, columns: int) -> Tensor:
    """Return the positions (B, S) that the model would give the tokens of a whole batch."""
    modules: Iterator[Any] = model.modules()
    for x in modules:
        if (make := _numbering(x)) is not None:
            if "input_ids" not in batch:
                raise ValueError("position_ids must be given where input_ids are not")
            return make(batch["input_ids"], x.padding_idx)
    device = (batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"]).device
    mask = batch.get("attention_mask")
    if mask is not None and _counts_mask(model):
        return (mask.long().cumsum(1) - 1).clamp(min=0)
    return torch.arange(columns, device=device).expand(rows, columns)


def _numbering(x: Any) -> Callable[..., Tensor] | None:
    """Return the function that numbers tokens from their padding, as RoBERTa's does, or None."""
    if not is_formula(x) and not isinstance(getattr(x, "position_embeddings", None), nn.Embedding):
        return None
    return getattr(x, _NUMBERING, None) or global_of(x, _NUMBERING)


def is_table(x: nn.Module) -> bool:
    """Return whether a module is a table of position embeddings that counts positions itself."""
    return isinstance(x, nn.Embedding) and takes(x, "position_ids")


def is_formula(x: nn.Module) -> bool:
    """Return whether a module computes position embeddings by a formula, as M2M100 does."""
    return hasattr(x, _NUMBERING) and isinstance(getattr(x, "weights", None), Tensor)


def _counts_mask(model: nn.Module) -> bool:
    """Return whether positions skip padding: by a table that gets no positions from around."""
    for around in model.modules():
        tables = [x for x in around.children() if is_table(x) and takes(x, "attention_mask")]
        forward = inspect.unwrap(type(around).forward)
        if tables and not _COUNTS_COLUMNS.search(_source(forward)):
            return True
    return False

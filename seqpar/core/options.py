"""Read options that several commands have: the lengths of documents, and the name of a dtype."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import torch

from seqpar.core.arguments import as_int, shown

LENGTH_FORMS = "4096, 512K, 1M or 4096x3 (K is 1,024, M is 1,024K, x3 is three of them)"
_EXPECTED = f"must be numbers of tokens such as {LENGTH_FORMS}"
MAX_LENGTH = 2**31 - 1
MAX_DOCUMENTS = 1_000_000
_LENGTH = re.compile("([0-9]+)([KM]?)(x[0-9]+)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1024, "M": 1024**2}

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)
_NAMES_OF_TORCH = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}


def read_lengths(name: str, text: str, most: int = MAX_DOCUMENTS) -> list[int]:
    """Return the lengths in a text in which lengths are separated by commas or white space.

    Raises a ValueError that starts with `name` if a word is not a length, if there is no word, or
    if the text has more than `most` lengths.
    """
    lengths: list[int] = []
    for word in text.replace(",", " ").split():
        match = _LENGTH.fullmatch(word)
        if match is None:
            raise ValueError(f"{name} {_EXPECTED}, got {shown(word)}")
        digits, unit, times = match[1], match[2].upper(), match[3] or "x1"
        length = as_int(name, int(digits[:20]) * _UNITS[unit], maximum=MAX_LENGTH)
        count = int(times[1:20])
        if len(lengths) + count > most:
            raise ValueError(f"{name} must have at most {most:,} documents")
        lengths += [length] * count
    if not lengths:
        raise ValueError(f"{name} {_EXPECTED}, got {shown(text)}")
    return lengths


def dtype_name(text: str) -> str:
    """Return the name in `DTYPES` for torch's name of a dtype. Return any other text unchanged."""
    return _NAMES_OF_TORCH.get(text, text)

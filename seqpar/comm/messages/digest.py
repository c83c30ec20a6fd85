"""The digest of a call's arguments in message headers, which reveals peers with other arguments.

A digest is a table of 2 bytes per argument, of one size for all calls. Ranks make it from the
description that `check_ranks` compares, once per layout and options.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

DIGEST_BYTES = 64
_ENTRY_BYTES = 2
_MAX_COMPARED_BYTES = 2**16  # of a tensor's values


class CallDigest(NamedTuple):
    """The digest of a call's arguments.

    Attributes:
        table: DIGEST_BYTES bytes: an entry for the names, and one for each argument.
        arguments: the arguments, by the names that users know, as this rank has them.
    """

    table: bytes
    arguments: Mapping[str, object]

    @classmethod
    def of(cls, arguments: Mapping[str, object]) -> CallDigest:
        """Return the digest of arguments that JSON can hold."""
        entries = [list(arguments), *arguments.values()]
        table = b"".join([_entry(json.dumps(value)) for value in entries])
        assert len(table) <= DIGEST_BYTES, f"{len(arguments)} arguments are too many"
        return cls(table.ljust(DIGEST_BYTES, b"\0"), arguments)

    def extended(self, **values: Tensor | None) -> CallDigest:
        """Return the digest with the values of small tensors, by their arguments' names.

        Reads only tensors on the CPU, since reading others would wait for their device.
        """
        contents = [None if x is None else content_of(x) for x in values.values()]
        if not any(contents):
            return self
        names, pairs = list(self.arguments), zip(values, contents, strict=True)
        entries = tuple([(names.index(name), *x) for name, x in pairs if x is not None])
        return self._replace(table=_extended(self.table, entries))

    def differing(self, table: bytes) -> list[str]:
        """Return the names of the arguments that have other entries in a peer's table.

        Tables of calls of different kinds have no names to compare.
        """
        if _at(table, 0) != _at(self.table, 0):
            return []
        return [
            name for i, name in enumerate(self.arguments, 1) if _at(table, i) != _at(self.table, i)
        ]


def content_of(x: Tensor) -> tuple[int, torch.dtype] | None:
    """Return a checksum of a small CPU tensor's bytes, and its dtype; None for other tensors."""
    if not x.is_cpu or x.nbytes > _MAX_COMPARED_BYTES:
        return None
    data: Any = x.detach().contiguous()
    if x.dtype is torch.bfloat16:  # numpy has no bfloat16
        data = data.view(torch.int16)
    return crc32(data.numpy()), x.dtype


@lru_cache(256)
def _extended(table: bytes, entries: tuple[tuple[int, int, torch.dtype], ...]) -> bytes:
    """Return a table in which the entries of some arguments also depend on their contents.

    `entries` has the number, checksum and dtype of each of these arguments.
    """
    changed = bytearray(table)
    for number, checksum, dtype in entries:
        start = (1 + number) * _ENTRY_BYTES
        text = f"{_at(table, 1 + number).hex()} {checksum} {dtype}"
        changed[start : start + _ENTRY_BYTES] = _entry(text)
    return bytes(changed)


def _at(table: bytes, index: int) -> bytes:
    return table[index * _ENTRY_BYTES : (index + 1) * _ENTRY_BYTES]


def _entry(text: str) -> bytes:
    return crc32(text.encode()).to_bytes(4)[-_ENTRY_BYTES:]


NO_DIGEST = CallDigest(bytes(DIGEST_BYTES), {})
"""The digest of messages outside calls, which have no arguments to compare."""

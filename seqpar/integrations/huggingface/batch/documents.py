"""Find the documents of a batch, from its padding mask, cu_seq_lens and position ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from seqpar.core.arguments import Ints, parse_cu_seqlens

Bools = NDArray[np.bool_]
CU_SEQLENS = ("cu_seq_lens_q", "cu_seq_lens_k")


class BatchDocuments(NamedTuple):
    """The documents of a batch of B rows of S tokens."""

    rows: int
    columns: int
    kept: Ints  # (T,): the tokens that are not padding, as indices into the B·S tokens
    cu_seqlens: Ints  # where documents begin among these T tokens
    samples: Ints  # where samples begin; labels are shifted within samples
    # Whether documents also begin at jumps of positions to numbers other than 0.
    packed: bool = False

    def by_rows(self) -> BatchDocuments:
        """Return the documents for a model that treats each row of the batch as one document. A row
        without tokens is an empty document.
        """
        counts = np.bincount(self.kept // self.columns, minlength=self.rows)
        return self._replace(cu_seqlens=np.r_[0, counts.cumsum()].astype(np.int64))

    def check_mask(self, mask: Tensor) -> None:
        real = np.zeros(self.rows * self.columns, bool)
        real[self.kept] = True
        if not np.array_equal(mask.detach().cpu().numpy().astype(bool).ravel(), real):
            raise ValueError("attention_mask must be the one of the batch that shard received")

    def squares(self) -> list[tuple[int, int, int]]:
        """Return (row, first column, last column + 1) of each document."""
        first = self.kept[np.minimum(self.cu_seqlens[:-1], self.kept.size - 1)]
        rows, starts = np.divmod(first, self.columns)
        stops = starts + np.diff(self.cu_seqlens)
        return list(zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True))


def find_documents(
    batch: Mapping[str, Any], rows: int, columns: int, prefix: str, cuts: bool | str = False
) -> BatchDocuments:
    """Find the documents of a batch from the keys that begin with `prefix`.

    A document begins at each row's first token that is not padding, at each entry of
    `cu_seq_lens_q`, and wherever the position is 0. If `cuts` is True, a document also begins
    wherever a position is not the previous position plus 1. If it is unknown whether documents
    begin there, `cuts` is a string with the reason.

    Raises a ValueError that names the key if keys contradict each other, if padding lies between a
    row's tokens, or if positions jump and `cuts` is a string.
    """
    mask_name = f"{prefix}attention_mask"
    real = _real_tokens(batch.get(mask_name), mask_name, rows, columns)
    begins = real.copy()
    begins[:, 1:] &= ~real[:, :-1]
    positions = None if prefix else _positions(batch.get("position_ids"), rows, columns)
    restarts, jumps = np.zeros_like(real), np.zeros_like(real)
    if positions is not None:
        steps = (positions[:, 1:] != positions[:, :-1] + 1) & real[:, 1:] & real[:, :-1]
        restarts[:, 1:] = steps & (positions[:, 1:] == 0)
        jumps[:, 1:] = steps & (positions[:, 1:] != 0)
    if not prefix and any(batch.get(name) is not None for name in CU_SEQLENS):
        begins |= _listed(batch, real, restarts | jumps if cuts else restarts)
        jumps &= ~begins
    begins |= restarts
    samples = begins.copy()
    packed = bool(cuts) and bool(jumps.any())
    if positions is not None and packed:
        if isinstance(cuts, str):
            row, column = (int(x[0]) for x in np.nonzero(jumps))
            before, after = positions[row, column - 1 : column + 1].tolist()
            where = f"at token {column} of row {row}"
            raise ValueError(f"position_ids jump from {before} to {after} {where}: {cuts}")
        begins |= jumps
    kept = np.flatnonzero(real)
    if not kept.size:
        raise ValueError("batch must have tokens that are not padding, got none")
    offsets = _offsets(begins, kept), _offsets(samples, kept)
    return BatchDocuments(rows, columns, kept, *offsets, packed)


def shape_of(x: object) -> tuple[int, ...] | str:
    return tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__


def _offsets(begins: Bools, kept: Ints) -> Ints:
    return np.r_[np.flatnonzero(begins.ravel()[kept]), kept.size].astype(np.int64)


def _real_tokens(mask: Any, name: str, rows: int, columns: int) -> Bools:
    if mask is None:
        return np.ones((rows, columns), dtype=bool)
    if shape_of(mask) != (rows, columns):
        got = f"{shape_of(mask)}: other masks are not documents"
        raise ValueError(f"{name} must be None or ({rows}, {columns}), got {got}")
    values = mask.detach().cpu().float().numpy()
    if not np.isin(values, (0, 1)).all():
        hint = "describe documents by position_ids or cu_seq_lens_q"
        raise ValueError(f"{name} must be 1 for tokens and 0 for padding; {hint}")
    real = values.astype(bool)
    rises = real[:, :1].sum(1) + (real[:, 1:] & ~real[:, :-1]).sum(1)
    if (rises > 1).any():
        row = int(np.argmax(rises > 1))
        where = f"between tokens of row {row}"
        raise ValueError(
            f"{name} must have padding only on the left or the right, got some {where}"
        )
    return real


def _positions(position_ids: Any, rows: int, columns: int) -> NDArray[Any] | None:
    """Return the positions (B, S) from which documents are found, or None if the batch has no such
    positions.
    """
    if position_ids is None:
        return None
    shape = tuple(position_ids.shape) if isinstance(position_ids, Tensor) else ()
    expected = (rows, columns)
    planes = (*shape[:1], *expected), (*shape[:1], 1, columns)
    if shape not in ((columns,), expected, (1, columns), *planes):
        wanted = f"{expected}, or (planes, {rows}, {columns})"
        raise ValueError(f"position_ids must be {wanted}, got {shape}")
    # The first of four planes (4, B, S) contains positions of text. Three planes do not show
    # documents.
    if len(shape) == 3 and shape[0] != 4:
        return None
    plane = position_ids[0] if len(shape) == 3 else position_ids
    if plane.is_floating_point():
        plane = plane.double()
    return np.broadcast_to(plane.detach().cpu().numpy(), expected)


def _listed(batch: Mapping[str, Any], real: Bools, restarts: Bools) -> Bools:
    """Return bools (B, S) that are True where a document of cu_seq_lens_q and cu_seq_lens_k
    begins.
    """
    names = [name for name in CU_SEQLENS if batch.get(name) is not None]
    lists = [parse_cu_seqlens(batch[name], name) for name in names]
    cu = lists[0]
    if any(not np.array_equal(cu, other) for other in lists):
        raise ValueError("cu_seq_lens_k must equal cu_seq_lens_q")
    if real.shape[0] != 1 or not real.all() or cu[-1] != real.size:
        shape = f"{real.shape[0]} rows of {real.shape[1]} tokens"
        found = f"{shape}, {int((~real).sum())} of them padding, and an end at {cu[-1]}"
        expected = "at the number of tokens of one row without padding"
        raise ValueError(f"{names[0]} must end {expected}, got {found}")
    begins = np.zeros_like(real)
    begins[0, cu[:-1][np.diff(cu) > 0]] = True
    if (restarts & ~begins).any():
        column = int(np.argmax(restarts & ~begins))
        reason = f"where {names[0]} begins no document"
        raise ValueError(f"position_ids restart at token {column}, {reason}")
    return begins

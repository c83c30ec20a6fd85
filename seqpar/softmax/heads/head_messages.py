"""Pack tensors into the messages of an exchange of heads, and unpack these messages.

The ranks of a *mesh row* exchange heads with each other. A buffer has one message for each rank, in
the order of the ranks. It has one of two forms. In *token form*, it contains all heads of one
rank's own tokens. In *head form*, it contains some heads of all tokens in the mesh row. A message
that is sent from a buffer in token form is received into a buffer in head form, and vice versa.
Within a message, all elements of one token lie next to each other, even if several tensors share
the message.

Letters of shapes: B is the batch, T_local the number of this rank's tokens, T_merged the number of
tokens in the mesh row, H the number of all heads, h the number of this rank's heads, and D the head
dim. lse, dlse and delta have no D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.core.device_tables import on_device
from seqpar.core.memo import Memo
from seqpar.layout.geometry import Geometry


class MergedRows:
    """The tokens of several ranks, in two orders: sorted by rank, and sorted by document and
    position.

    The indices that convert one order into the other are copied to a device only once.
    """

    def __init__(self, layout: Geometry, ranks: range) -> None:
        indices = [layout.token_indices(rank) for rank in ranks]
        self.counts = [index.size for index in indices]  # the number of rows of each rank
        self.total = sum(self.counts)
        tokens = np.concatenate(indices)
        # 32-bit indices need half the memory of torch's usual indices, and are read faster.
        order = np.argsort(tokens).astype(np.int32 if self.total < 2**31 else np.int64)
        # Whether the two orders are the same.
        self.in_order = bool((tokens[1:] > tokens[:-1]).all())
        self._order = None if self.in_order else order
        self._derived = Memo()

    @classmethod
    def of(cls, layout: Geometry, ranks: range) -> MergedRows:
        """Return the rows of consecutive ranks. The result is stored with the layout."""
        return layout.derived(("merged rows", ranks), lambda: cls(layout, ranks))

    def merge(self, x: Tensor) -> Tensor:
        """Reorder x (total, …) from the order of the ranks to the order of the documents."""
        return x if self.in_order else x.index_select(0, self._index("merge", x.device))

    def split(self, merged: Tensor) -> Tensor:
        if self.in_order:
            return merged
        return merged.index_select(0, self._index("split", merged.device))

    def _index(self, direction: str, device: torch.device) -> Tensor:
        return on_device(self._derived(direction, lambda: self._make_index(direction)), device)

    def _make_index(self, direction: str) -> Tensor:
        assert self._order is not None
        if direction == "merge":
            return torch.from_numpy(self._order)
        inverse = np.empty_like(self._order)
        inverse[self._order] = np.arange(self.total, dtype=inverse.dtype)
        return torch.from_numpy(inverse)


class Operand(NamedTuple):
    """A tensor whose heads are exchanged.

    Attributes:
        name: the name of the tensor.
        dtype: the dtype in which the tensor is sent.
        rows: the tokens of the tensor on all ranks of the mesh row.
        heads: the heads that each rank of the mesh row computes.
        dim: D, or None for a tensor without D.
        add: whether several ranks may return results for the same head, which are then added in the
            order of the ranks.
    """

    name: str
    dtype: torch.dtype
    rows: MergedRows
    heads: Sequence[slice]
    dim: int | None
    add: bool = False

    def count(self, rank: int) -> int:
        return self.heads[rank].stop - self.heads[rank].start

    def width(self, rank: int) -> int:
        """Return how many elements of each token are in the message to or from a rank."""
        return self.count(rank) * (self.dim or 1)


class _Run(NamedTuple):
    """Heads of consecutive ranks that one strided copy can pack.

    Each of these ranks has the same number of heads. From each rank to the next rank, the index of
    the first head increases by `step`.
    """

    shape: tuple[int, ...]  # number of ranks, T_local, B, heads of a rank, D
    strides: tuple[int, ...]  # strides of these dimensions in the buffer in token form
    offset: int  # the first element in this buffer
    head: int  # the first head of the first rank
    step: int  # the number of heads from one rank's first head to the next rank's first head

    def in_messages(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.shape, self.strides, self.offset)

    def in_tensor(self, x: Tensor) -> Tensor:
        batch_stride, token_stride, head_stride = x.stride()[:3]
        strides = self.step * head_stride, token_stride, batch_stride, head_stride, 1
        return x.as_strided(self.shape, strides, x.storage_offset() + self.head * head_stride)

    def followed_by(self, other: _Run) -> _Run | None:
        """Return the heads of `self` and `other` as one `_Run`, or None if one copy cannot pack
        both.

        `other` contains the heads of the next rank that has heads.
        """
        last = self.shape[0] - 1
        step = other.head - (self.head + last * self.step)
        stride = other.offset - (self.offset + last * self.strides[0])
        uneven = last and (step, stride) != (self.step, self.strides[0])
        if uneven or (self.shape[1:], self.strides[1:]) != (other.shape[1:], other.strides[1:]):
            return None
        shape, strides = (last + 2, *self.shape[1:]), (stride, *self.strides[1:])
        return self._replace(shape=shape, strides=strides, step=step)


class _Part(NamedTuple):
    add: bool
    runs: list[_Run]  # in token form
    heads: int  # this rank's number of heads, in head form
    # Shape, strides and offset of the tensor in head form.
    view: tuple[tuple[int, ...], tuple[int, ...], int]


class _Section(NamedTuple):
    """The part of a buffer with messages that contains all tensors with the same tokens."""

    rows: MergedRows
    offset: int
    width: int  # elements per token

    def view(self, flat: Tensor) -> Tensor:
        return flat.as_strided((self.rows.total, self.width), (self.width, 1), self.offset)


class MessageBlock:
    """Tensors with the same dtype that are exchanged in one buffer.

    Tensors with the same tokens are sent in the same message. Methods take and return tensors in
    the order of `names`.
    """

    def __init__(self, operands: Sequence[Operand], row: range, index: int, batch: int) -> None:
        """Plan the exchange of tensors among the ranks `row`. This rank is `row[index]`."""
        self.dtype, self.names = operands[0].dtype, list[str]()
        # The number of elements of each message in token form and in head form, one message for
        # each rank of the mesh row. If queries and keys are different tokens, the messages with
        # queries come first, and the messages with keys follow.
        self.token_sizes: list[int] = []
        self.head_sizes: list[int] = []
        self._parts: list[_Part] = []
        self._sections: list[_Section] = []
        for rows in dict.fromkeys(x.rows for x in operands):
            self._add([x for x in operands if x.rows is rows], rows, index, batch)
        self.token_elements, self.head_elements = sum(self.token_sizes), sum(self.head_sizes)
        self._in_order = all(section.rows.in_order for section in self._sections)
        messages = list(enumerate([*row] * len(self._sections)))
        # The indices of the messages from this rank to itself, and (index, rank) of all other
        # messages.
        self.own = [number for number, rank in messages if rank == row[index]]
        self.others = [(number, rank) for number, rank in messages if rank != row[index]]

    def _add(self, operands: list[Operand], rows: MergedRows, index: int, batch: int) -> None:
        tokens, ranks = rows.counts[index], range(len(rows.counts))
        widths = [sum(x.width(rank) for x in operands) for rank in ranks]
        sizes = [tokens * batch * width for width in widths]
        offsets = list(accumulate(sizes, initial=sum(self.token_sizes)))
        width, offset = widths[index], sum(self.head_sizes)
        self._sections.append(_Section(rows, offset, batch * width))
        self.token_sizes += sizes
        self.head_sizes += [count * batch * width for count in rows.counts]
        for x in operands:
            dim, runs = x.dim or 1, list[_Run]()
            for rank in filter(x.count, ranks):
                shape = 1, tokens, batch, x.count(rank), dim
                strides = 0, batch * widths[rank], widths[rank], dim, 1
                run = _Run(shape, strides, offsets[rank], x.heads[rank].start, 0)
                joined = runs[-1].followed_by(run) if runs else None
                runs[-1:] = [joined] if joined else [*runs[-1:], run]
                offsets[rank] += x.width(rank)
            heads, dims = x.count(index), 3 if x.dim is None else 4
            view_shape = (batch, rows.total, heads, dim)[:dims]
            view_strides = (width, batch * width, dim, 1)[:dims]
            self.names.append(x.name)
            self._parts.append(_Part(x.add, runs, heads, (view_shape, view_strides, offset)))
            offset += x.width(index)

    def pack_tokens(self, tensors: Sequence[Tensor]) -> Tensor:
        flat = tensors[0].new_empty(self.token_elements, dtype=self.dtype)
        for x, part in zip(tensors, self._parts, strict=True):
            for run in part.runs:
                run.in_messages(flat).copy_(run.in_tensor(x))
        return flat

    def unpack_tokens(self, flat: Tensor, targets: Sequence[Tensor]) -> None:
        """Copy received heads of this rank's tokens to the targets (B, T_local, H, D).

        The heads of a tensor with `Operand.add` are added to its target.
        """
        for target, part in zip(targets, self._parts, strict=True):
            for run in part.runs:
                heads, arrived = run.in_tensor(target), run.in_messages(flat)
                if not part.add:
                    heads.copy_(arrived)
                elif run.step >= run.shape[3]:
                    heads.add_(arrived)
                else:  # several ranks return the same heads
                    for ours, theirs in zip(heads, arrived, strict=True):
                        ours.add_(theirs)

    def pack_heads(self, tensors: Sequence[Tensor]) -> Tensor:
        """Pack this rank's heads of all tokens, (B, T_merged, h, D), into messages to all ranks.

        In the messages, rows are ordered by the rank to which they are sent. If there is only one
        tensor, and its rows already have this order, the tensor is not copied. A tensor without
        heads on this rank is ignored.
        """
        if len(tensors) == 1:
            flat = tensors[0].to(self.dtype).transpose(0, 1).reshape(-1)
        else:
            flat = tensors[0].new_empty(self.head_elements, dtype=self.dtype)
            for x, part in zip(tensors, self._parts, strict=True):
                if part.heads:
                    flat.as_strided(*part.view).copy_(x)
        return self._reordered(flat, MergedRows.split)

    def merge(self, flat: Tensor) -> Tensor:
        """Reorder the rows of received heads from rank order to the order of the documents."""
        return self._reordered(flat, MergedRows.merge)

    def _reordered(self, flat: Tensor, order: Callable[[MergedRows, Tensor], Tensor]) -> Tensor:
        if self._in_order:
            return flat
        parts = [order(section.rows, section.view(flat)).view(-1) for section in self._sections]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def in_heads(self, merged: Tensor) -> list[Tensor]:
        """Return views (B, T_merged, h, D) of the tensors in a buffer that `merge` returned."""
        first = merged.storage_offset()
        return [
            merged.as_strided(shape, strides, first + offset)
            for shape, strides, offset in (part.view for part in self._parts)
        ]

"""Pack tensors into the messages that exchange tokens for heads, and take them out again.

Tensors have two forms: in *token form* a rank has all heads of its own tokens, in *head form* its
own heads of the tokens of all ranks of its row. In either form a flat buffer has a message for each
rank, in their order: those of one form are sent, and arrive as the other. In a message all tensors
of a token lie side by side, so that in head form, once rows are in order, each of them is a view of
the buffer.

Legend: B batch, T_local this rank's tokens, T_merged those of all ranks of the row, H heads and h
this rank's, D head dim. Tensors of numbers have no D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.softmax.heads.row_order import MergedRows


class Operand(NamedTuple):
    """A tensor that is exchanged: its tokens, the heads that each rank gets, and D, if it has it.

    With `add`, heads that come back from several ranks are added up, in the order of the ranks.
    """

    name: str
    dtype: torch.dtype
    rows: MergedRows
    heads: Sequence[slice]
    dim: int | None
    add: bool = False

    def count(self, rank: int) -> int:
        """Return how many heads a rank gets."""
        return self.heads[rank].stop - self.heads[rank].start

    def width(self, rank: int) -> int:
        """Return how many elements of each token a rank gets."""
        return self.count(rank) * (self.dim or 1)


class _Run(NamedTuple):
    """The heads that some consecutive ranks get, as many each, evenly apart: one strided copy."""

    shape: tuple[int, ...]  # ranks, T_local, B, heads of a rank, D
    strides: tuple[int, ...]  # likewise, in the messages
    offset: int  # in the messages
    head: int  # the first rank's first
    step: int  # from one rank's first head to the next one's

    def in_messages(self, flat: Tensor) -> Tensor:
        """Return these heads in token form's messages, as a view of this shape."""
        return flat.as_strided(self.shape, self.strides, self.offset)

    def in_tensor(self, x: Tensor) -> Tensor:
        """Return these heads in x (B, T_local, H, D), as a view of this shape."""
        of_batch, of_tokens, of_heads = x.stride()[:3]
        strides = self.step * of_heads, of_tokens, of_batch, of_heads, 1
        return x.as_strided(self.shape, strides, x.storage_offset() + self.head * of_heads)

    def followed_by(self, other: _Run) -> _Run | None:
        """Return both in one, if that is possible; `other` has one rank."""
        last = self.shape[0] - 1
        step = other.head - (self.head + last * self.step)
        stride = other.offset - (self.offset + last * self.strides[0])
        uneven = last and (step, stride) != (self.step, self.strides[0])
        if uneven or (self.shape[1:], self.strides[1:]) != (other.shape[1:], other.strides[1:]):
            return None
        shape, strides = (last + 2, *self.shape[1:]), (stride, *self.strides[1:])
        return self._replace(shape=shape, strides=strides, step=step)


class _Part(NamedTuple):
    """Where a tensor lies in the messages of a block."""

    add: bool
    runs: list[_Run]  # in token form
    heads: int  # in head form
    view: tuple[tuple[int, ...], tuple[int, ...], int]  # likewise: shape, strides, offset


class _Section(NamedTuple):
    """The messages in head form of all tensors of the same tokens: rows of this many elements."""

    rows: MergedRows
    offset: int
    width: int

    def of(self, flat: Tensor) -> Tensor:
        """Return them, (T_merged, width)."""
        return flat.as_strided((self.rows.total, self.width), (self.width, 1), self.offset)


class MessageBlock:
    """Tensors of one dtype, exchanged in one buffer; those of the same tokens in one message.

    Attributes:
        dtype: of all of them.
        names: what they are called, in the order in which methods take and return them.
        token_sizes, head_sizes: of each form, the elements of each message. There is one for each
            rank of the row or, where there are tensors of queries' tokens and of other keys', first
            one for each of one kind, then one for each of the other.
        token_elements, head_elements: of all of them.
        own, others: the numbers of the messages that are this rank's, and (number, rank) of those
            of other ranks.
    """

    def __init__(self, operands: Sequence[Operand], row: range, index: int, batch: int) -> None:
        """Exchange these tensors in a row of ranks, of which this one is number `index`."""
        self.dtype, self.names = operands[0].dtype, list[str]()
        self.token_sizes: list[int] = []
        self.head_sizes: list[int] = []
        self._parts: list[_Part] = []
        self._sections: list[_Section] = []
        for rows in dict.fromkeys(x.rows for x in operands):
            self._add([x for x in operands if x.rows is rows], rows, index, batch)
        self.token_elements, self.head_elements = sum(self.token_sizes), sum(self.head_sizes)
        self._in_order = all(section.rows.in_order for section in self._sections)
        numbered = list(enumerate([*row] * len(self._sections)))
        self.own = [number for number, rank in numbered if rank == row[index]]
        self.others = [(number, rank) for number, rank in numbered if rank != row[index]]

    def _add(self, operands: list[Operand], rows: MergedRows, index: int, batch: int) -> None:
        """Add the tensors that have these rows."""
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
                together = runs[-1].followed_by(run) if runs else None
                runs[-1:] = [together] if together else [*runs[-1:], run]
                offsets[rank] += x.width(rank)
            heads, dims = x.count(index), 3 if x.dim is None else 4
            full = (batch, rows.total, heads, dim), (width, batch * width, dim, 1)
            self.names.append(x.name)
            view = full[0][:dims], full[1][:dims], offset
            self._parts.append(_Part(x.add, runs, heads, view))
            offset += x.width(index)

    def pack_tokens(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the messages with these tensors (B, T_local, H, D) in token form."""
        flat = tensors[0].new_empty(self.token_elements, dtype=self.dtype)
        for x, part in zip(tensors, self._parts, strict=True):
            for run in part.runs:
                run.in_messages(flat).copy_(run.in_tensor(x))
        return flat

    def unpack_tokens(self, flat: Tensor, targets: Sequence[Tensor]) -> None:
        """Set the targets (B, T_local, H, D) at all ranks' heads, or add to them there."""
        for target, part in zip(targets, self._parts, strict=True):
            for run in part.runs:
                heads, arrived = run.in_tensor(target), run.in_messages(flat)
                if not part.add:
                    heads.copy_(arrived)
                elif run.step >= run.shape[3]:
                    heads.add_(arrived)
                else:  # ranks that have the same heads
                    for ours, theirs in zip(heads, arrived, strict=True):
                        ours.add_(theirs)

    def pack_heads(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the messages with these tensors (B, T_merged, h, D) in head form.

        A tensor that is the only one, and whose rows are in order, is not copied. One of which this
        rank has no heads is not looked at.
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
        """Return messages in head form with their rows in order: `flat` itself where they are."""
        return self._reordered(flat, MergedRows.merge)

    def _reordered(self, flat: Tensor, order: Callable[[MergedRows, Tensor], Tensor]) -> Tensor:
        """Return messages in head form with the rows of each section in an order."""
        if self._in_order:
            return flat
        parts = [order(section.rows, section.of(flat)).view(-1) for section in self._sections]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def in_heads(self, merged: Tensor) -> list[Tensor]:
        """Return the tensors (B, T_merged, h, D), of which `merge` returned this, as views."""
        views = [part.view for part in self._parts]
        first = merged.storage_offset()
        return [merged.as_strided(shape, strides, first + at) for shape, strides, at in views]

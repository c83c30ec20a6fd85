"""Find which dimensions of a tensor are tokens, and the position of each local token.

A *position* is the index of a token in its whole sequence, or −1 for padding. An *order* describes
which positions each rank holds. An order is given as a name in `ORDERS`, a `Layout`, or a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from seqpar.core.arguments import CuSeqlens, Ints, as_choice, as_int_array, shown
from seqpar.layout.layout import Layout

ORDERS = ("head_tail", "contiguous", "striped")
Order = Layout | str | Callable[[int, int, int], CuSeqlens] | None
# The model's arguments that are tried first to find the shape of tokens.
_IDS = ("input_ids", "tokens", "ids")


class Batch(NamedTuple):
    """The shape of a rank's tokens: `rows` sequences with `tokens` local tokens each."""

    rows: int
    tokens: int


def batch_of(inputs: Mapping[str, Tensor], known: int | None) -> Batch | None:
    """Return the shape of a rank's tokens, from the tensors with which the rank's model was called.

    `known` is the number of local tokens according to `layout=` or `tokens=`. Integer tensors are
    (rows, tokens) or (tokens,). Floating-point tensors also have a last dimension of features.
    """
    found = [inputs[name] for name in _IDS if name in inputs]
    found += [x for x in inputs.values() if _is_integer(x)]
    found += [x for x in inputs.values() if x.is_floating_point()]
    shapes = [tuple(x.shape if _is_integer(x) else x.shape[:-1]) for x in found]
    shapes = [x for x in shapes if 0 < len(x) <= 2]
    if known is None:
        return (
            None if not shapes else Batch(1 if len(shapes[0]) == 1 else shapes[0][0], shapes[0][-1])
        )
    for shape in shapes:
        if known in shape:
            others = [x for x in shape[:-1] if shape[-1] == known] or [shape[-1]]
            return Batch(1 if len(shape) == 1 else others[0], known)
        if len(shape) == 2 and shape[0] * shape[1] == known:
            return Batch(*shape)
    return Batch(1, known) if not shapes else None


def _is_integer(x: Tensor) -> bool:
    return not x.is_floating_point() and not x.is_complex()


def token_rows(x: Tensor, batch: Batch) -> Tensor | None:
    """Return `x` as (rows, tokens, features), or None if `x` has no dimension of tokens.

    Tokens are usually the dimension after the rows. They can also be the first dimension, as in
    Megatron, or the dimension after the heads. A tensor with a single row, such as the cosines of
    RoPE, counts as the first row of the batch.
    """
    rows, tokens = batch
    shape = tuple(x.shape)
    if shape[:2] == (rows, tokens):
        return _with_features(x, rows, tokens)
    if len(shape) > 2 and shape[:2] == (tokens, rows):
        return _with_features(x.transpose(0, 1), rows, tokens)
    if shape[:2] == (1, tokens) or (len(shape) > 1 and shape[0] == tokens):
        return _with_features(x, 1, tokens)
    if len(shape) > 1 and shape[0] == rows * tokens:
        return _with_features(x, rows, tokens)
    if len(shape) == 4 and shape[0] == rows and shape[2] == tokens:
        return _with_features(x.transpose(1, 2), rows, tokens)
    return None


def _with_features(x: Tensor, rows: int, tokens: int) -> Tensor:
    # reshape(rows, tokens, -1) would fail on a rank without tokens.
    first = 2 if x.shape[0] != rows * tokens or x.shape[:2] == (rows, tokens) else 1
    return x.reshape(rows, tokens, math.prod(x.shape[first:]))


def as_order(layout: object, tokens: object) -> Order:
    """Return `layout`. Raises a ValueError if it is wrong, or if `tokens` is given too."""
    if layout is not None and tokens is not None:
        raise ValueError(
            "tokens must be None with layout=: pass one of them to state the positions"
        )
    if layout is None or isinstance(layout, Layout) or callable(layout):
        return layout
    if not isinstance(layout, str):
        kinds = f"a Layout, one of {', '.join(ORDERS)}, or a function of (rank, ranks, tokens)"
        raise ValueError(f"layout must be {kinds}, got {shown(layout)}")
    return as_choice("layout", layout, ORDERS)


def stated_positions(
    order: Order, tokens: Tensor | None, rank: int, ranks: int, batch: Batch | None
) -> tuple[str, Ints | None]:
    """Return the name of an order of tokens, and the positions of this rank's tokens.

    The positions are None if `order` is None, or if the positions depend on how many tokens other
    ranks have.
    """
    if tokens is not None:
        return "tokens", tokens.detach().cpu().numpy().astype(np.int64).reshape(-1)
    if isinstance(order, Layout):
        if order.ranks != ranks:
            raise ValueError(f"layout must have {ranks} ranks, as the group, got {order.ranks}")
        padding = order.padding(rank).numpy()
        return "layout", np.where(padding, -1, order.token_indices(rank).numpy())
    if order is None or isinstance(order, str):
        return order or "unknown", None
    if batch is None:
        raise ValueError(
            "layout must not be a function if the model's inputs have no tokens: pass tokens="
        )
    positions = as_int_array(
        "layout: the function's result", order(rank, ranks, batch.tokens * ranks)
    )
    if positions.size != batch.tokens:
        expected = f"{batch.tokens} positions for rank {rank}, as many as the model's tokens"
        raise ValueError(f"layout: the function must return {expected}, got {positions.size}")
    return "function", positions


def positions_of(order: str, counts: Sequence[int]) -> list[Ints]:
    """Return the positions of each rank's tokens in a named order."""
    ranks, total = len(counts), sum(counts)
    every = np.arange(total)
    if order == "contiguous":
        return np.split(every, np.cumsum(counts)[:-1])
    if len(set(counts)) > 1 or (order == "head_tail" and counts[0] % 2):
        raise ValueError(
            f"layout {order} needs an equal{', even' * (order == 'head_tail')} number of tokens "
            f"per rank, got {counts}: pass tokens= instead"
        )
    if order == "striped":
        return [every[rank::ranks] for rank in range(ranks)]
    chunks = np.split(every, 2 * ranks)
    return [np.concatenate([chunks[i], chunks[2 * ranks - 1 - i]]) for i in range(ranks)]


def found_order(
    ids: Sequence[Ints], position_ids: Sequence[Ints | None], reference: Ints | None
) -> tuple[str, list[Ints]] | None:
    """Find the order in which the ranks hold the tokens of a sequence. Returns the order and the
    positions of each rank's tokens, or None if no known order matches.

    `ids` are the token ids of each rank, (rows, tokens). `reference` are the token ids of the other
    recording, (rows, all tokens). If the `position_ids` of all ranks together are 0 … T − 1, the
    order that they define is tried first. Without a reference, no other order can be found.
    """
    counts = [x.shape[1] for x in ids]
    candidates: list[tuple[str, list[Ints]]] = []
    first_rows = [None if x is None else np.atleast_2d(x)[0] for x in position_ids]
    if all(x is not None and x.size == n for x, n in zip(first_rows, counts, strict=True)):
        known = [x for x in first_rows if x is not None]
        if np.array_equal(np.sort(np.concatenate(known)), np.arange(sum(counts))):
            candidates.append(("position_ids", known))
    for order in ("contiguous", "head_tail", "striped"):
        try:
            candidates.append((order, positions_of(order, counts)))
        except ValueError:
            continue
    for order, positions in candidates:
        if reference is None:
            return (order, positions) if order == "position_ids" else None
        if reference.shape[1] == sum(counts) and all(
            any(
                all(np.array_equal(row[at], x[i]) for at, x in zip(positions, ids, strict=True))
                for row in reference
            )
            for i in range(ids[0].shape[0])
        ):
            return order, positions
    return None


def document_starts(position_ids: Ints | None, shape: tuple[int, int]) -> NDArray[np.bool_]:
    """Return (rows, tokens): whether a document begins at each token.

    A document begins at the first token of a row, and at each token whose position is not the
    previous token's position plus 1.
    """
    starts = np.zeros(shape, bool)
    starts[:, :1] = True
    if position_ids is not None:
        starts[:, 1:] |= np.diff(position_ids, axis=1) != 1
    return starts

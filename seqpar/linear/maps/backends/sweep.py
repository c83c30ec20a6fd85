"""Pass states from chunk to chunk, for all spans at once: the only sequential part.

Between chunks states are in fp64, since a decay near 1 rounds a state the same way in each chunk,
which would add up: to 6e-6 over 100,000 tokens at a log decay of 1e-7, and in fp64 to less than
2.4e-7.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from seqpar.linear.maps.backends.grid import Grid


class Step(NamedTuple):
    """Each chunk's step on a state S: rows Y = rows + reads S, next S = D S + added + writes Y.

    decay is log D (M, N, K or 1), in fp64; rows are (M, N, C, V), reads (M, N, C, K), writes
    (M, N, K, C) and added (M, N, K, V). None omits the term.
    """

    decay: Tensor | None
    added: Tensor | None = None
    rows: Tensor | None = None
    reads: Tensor | None = None
    writes: Tensor | None = None


class Swept(NamedTuple):
    """The results of a sweep: the states before each chunk (M, N, K, V), rows Y, and last states.

    Those are (spans, N, K, V).
    """

    states: Tensor
    rows: Tensor | None
    last: Tensor


def sweep(grid: Grid, step: Step, states: Tensor, reverse: bool = False) -> Swept:
    """Pass states (spans, N, K, V) through the chunks; with `reverse` the last chunks are first."""
    before = states.new_empty((grid.chunks, *states.shape[1:]))
    rows = None
    if step.rows is not None:
        rows = torch.empty_like(step.rows, memory_format=torch.contiguous_format)
    return Swept(before, rows, _sweep(grid, step, states, reverse, before, rows))


def last_states(
    grid: Grid, step: Step, states: Tensor, reverse: bool = False, least: float = 0.0
) -> Tensor:
    """Return only the last states of a sweep. Elements smaller than `least` become 0."""
    return _sweep(grid, step, states, reverse, None, None, least)


def _sweep(
    grid: Grid,
    step: Step,
    states: Tensor,
    reverse: bool,
    before: Tensor | None,
    rows: Tensor | None,
    least: float = 0.0,
) -> Tensor:
    last = states.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    factors = None if step.decay is None else step.decay.exp()[..., None]
    for chunks in reversed(grid.steps) if reverse else grid.steps:
        carried = last[: chunks.stop - chunks.start]
        if before is None:
            state = carried.to(states.dtype, copy=True)
        else:
            state = before[chunks].copy_(carried)
        if factors is not None:
            carried *= factors[chunks]
        if step.added is not None:
            carried += step.added[chunks]
        if step.reads is not None and step.writes is not None:
            into = None if rows is None else rows[chunks]
            read = _read(step.reads[chunks], state, step.rows, chunks, into)
            carried += step.writes[chunks] @ read
        if least:
            carried.copy_(hardshrink(carried, least))
    return last.to(states.dtype)


def _read(
    reads: Tensor, state: Tensor, rows: Tensor | None, chunks: slice, into: Tensor | None
) -> Tensor:
    """Return rows + reads S of some chunks, where it is given in the memory `into`."""
    if rows is None:
        return reads @ state
    if into is None:
        into = torch.empty_like(rows[chunks], memory_format=torch.contiguous_format)
    factors = (x.flatten(0, 1) for x in (rows[chunks], reads, state))
    torch.baddbmm(*factors, out=into.flatten(0, 1))
    return into

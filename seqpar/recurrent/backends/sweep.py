"""Pass states from chunk to chunk, for all spans at once: the only sequential part."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.recurrent.backends.grid import Grid


class Decay(NamedTuple):
    """What a chunk multiplies a state by, D = kept + rest, each (M, N, K or 1, 1).

    kept is 0 or 1. The rounding of D near 1 would be the same in each chunk, and add up; that of
    rest is relative to what is forgotten.
    """

    kept: Tensor
    rest: Tensor

    @classmethod
    def of(cls, total: Tensor, dtype: torch.dtype) -> Decay:
        """Return it for log D (M, N, K or 1)."""
        total = total[..., None]
        kept = total > -0.5
        rest = torch.where(kept, torch.expm1(total), torch.exp(total))
        return cls(kept.to(dtype), rest.to(dtype))

    def apply(self, states: Tensor, chunks: slice) -> Tensor:
        """Return the states (m, N, K, V) that some of the chunks leave of those that enter them."""
        return torch.addcmul(states * self.kept[chunks], states, self.rest[chunks])


class Step(NamedTuple):
    """What each chunk does to a state S: rows Y = rows + reads S, next S = D S + added + writes Y.

    rows are (M, N, C, V), reads (M, N, C, K), writes (M, N, K, C), added (M, N, K, V). None: there
    is no such term; without reads there are no rows.
    """

    decay: Decay | None
    reads: Tensor | None = None
    writes: Tensor | None = None
    rows: Tensor | None = None
    added: Tensor | None = None


class Swept(NamedTuple):
    """What a sweep found: the states before each chunk (M, N, K, V), rows Y, and the last states.

    Those are (spans, N, K, V).
    """

    states: Tensor
    rows: Tensor | None
    last: Tensor


def sweep(grid: Grid, step: Step, states: Tensor, reverse: bool = False) -> Swept:
    """Pass states (spans, N, K, V) through the chunks, with `reverse` from the last to the first."""
    last = states.clone()
    before = states.new_empty((grid.chunks, *states.shape[1:]))
    rows = None if step.rows is None else torch.empty_like(step.rows)
    for chunks in reversed(grid.steps) if reverse else grid.steps:
        state = last[: chunks.stop - chunks.start]
        before[chunks] = state
        state = _next(step, chunks, state, rows)
        last[: state.shape[0]] = state
    return Swept(before, rows, last)


def last_states(grid: Grid, step: Step, states: Tensor, reverse: bool = False) -> Tensor:
    """Return only the last states of a sweep."""
    last = states.clone()
    for chunks in reversed(grid.steps) if reverse else grid.steps:
        state = _next(step, chunks, last[: chunks.stop - chunks.start], None)
        last[: state.shape[0]] = state
    return last


def _next(step: Step, chunks: slice, state: Tensor, rows: Tensor | None) -> Tensor:
    after = state if step.decay is None else step.decay.apply(state, chunks)
    if step.added is not None:
        after = after + step.added[chunks]
    if step.reads is None or step.writes is None:
        return after
    read = _product(step.reads[chunks], state, None if step.rows is None else step.rows[chunks])
    if rows is not None:
        rows[chunks] = read
    return _product(step.writes[chunks], read, after)


def _product(x: Tensor, y: Tensor, added: Tensor | None) -> Tensor:
    """Return x @ y + added, of (m, N, …) tensors."""
    if added is None:
        return x @ y
    x, y = x.flatten(0, 1), y.flatten(0, 1)
    return torch.baddbmm(added.flatten(0, 1), x, y).view(added.shape)

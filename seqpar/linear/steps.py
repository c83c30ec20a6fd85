"""Run the steps of both primitives through hooks, which can trace or replace them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from seqpar.core.hooks import hooks

NOMINAL_CHUNK = 64  # rows that a trace assumes are computed together, all with each other

T = TypeVar("T")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class LinearWork(NamedTuple):
    """The work of a step of a forward or backward.

    Attributes:
        area: the number of pairs of query and key that would cost softmax attention the same.
        share: the fraction of the whole pass's area.
        tokens: rows, over the whole batch.
        heads, dims: the number of states, and their two dims.
        backward: whether the pass is the backward.
    """

    area: int
    share: float
    tokens: int
    heads: int
    dims: tuple[int, int]
    backward: bool


class Steps(Protocol[R_co]):
    """The two later steps of a pass; the first one is the constructor."""

    def local(self) -> None:
        """Compute all that does not depend on other spans."""

    def finish(self, states: Tensor | None) -> R_co:
        """Return the results, given the states (or their gradients) from other spans, if any."""


S = TypeVar("S", bound=Steps[object])


class HookedSteps(Generic[S, R]):
    """The steps of a backend's forward or backward; a subclass knows the areas of the steps.

    If a hook replaced the computation, `steps` is None and `arbitrary` makes the results.
    """

    steps: S | None

    def __init__(
        self,
        device: torch.device,
        shape: tuple[int, int, tuple[int, int], bool],
        arbitrary: Callable[[], R],
    ) -> None:
        self._device, self._shape, self._arbitrary = device, shape, arbitrary

    def compute(self, area: int, share: float, step: Callable[[], T]) -> T | None:
        """Return `step()`, or None if a hook replaced it."""
        return hooks.compute(lambda: LinearWork(area, share, *self._shape), self._device, step)

    @property
    def made(self) -> S:
        """The steps, which no hook replaced."""
        assert self.steps is not None
        return self.steps

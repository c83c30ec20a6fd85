"""The primitive of linear attention: (inputs, spans) -> out and what leaves spans; its backward.

All that later tokens of its document need of a span is a state, or a map
(`states/state_options.py` and `maps/map_options.py` have the formulas). How they move between ranks
is a strategy's business. Every strategy computes only with `begin_forward` and `begin_backward`.
`inputs.py` has the legend of shapes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from seqpar.attention.backend import load_backend
from seqpar.core.hooks import hooks
from seqpar.linear.inputs import Gradients, Inputs
from seqpar.linear.routes import SpanStates

NOMINAL_CHUNK = 64  # rows that a trace assumes are computed together, all with each other

StepName = Literal["begin", "local", "finish"]
T = TypeVar("T")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
O = TypeVar("O")  # noqa: E741  what leaves spans: a Tensor of states, or Maps
O_co = TypeVar("O_co", covariant=True)


class LinearWork(NamedTuple):
    """The work of one or more steps of a forward or backward."""

    area: int  # the number of pairs of query and key that would cost softmax attention the same
    share: float  # the fraction of the whole pass's area
    tokens: int  # rows, over the whole batch
    heads: int  # the number of states
    dims: tuple[int, int]  # of a state
    backward: bool


class Options(ABC, Generic[O]):
    """The options of a call that change its arithmetic."""

    family: ClassVar[str]  # the family of backends (a key of `BACKENDS`)
    backend: str

    def on_meta(self) -> Self:
        """Return the options of a rehearsal, whose operands are on the meta device."""
        return self

    @abstractmethod
    def empty(self, inputs: Inputs, count: int) -> O:
        """Return what leaves `count` spans, all 0, in fp32 (fp64 for fp64)."""

    @abstractmethod
    def work(self, inputs: Inputs, backward: bool, *steps: StepName) -> LinearWork:
        """Return the work of these steps of a pass."""


class Steps(Protocol[O_co, R_co]):
    """A backend's forward or backward in three steps, so that an exchange fits between them.

    The first is the constructor, which computes `outgoing`, for each span that anything leaves. In
    forward that is the state or the map of only the span's rows, by the index in `state_out`. In
    backward it belongs to the spans that a state enters, by the index in `state_in`: the gradient
    of the entering state as far as it comes through the span's own rows; or a map from the gradient
    of the state that leaves to the gradient of the state that enters, whose transition is the
    transpose of forward's. `local` is optional: it gives a rank work while states travel, which
    `finish` does otherwise.
    """

    @property
    def outgoing(self) -> O_co: ...

    def local(self) -> None:
        """Compute all that does not depend on other spans."""

    def finish(self, states: Tensor | None) -> R_co:
        """Return the results, given the states that enter spans; None: they are 0.

        In forward the result is out (B, T, max(Hq, H), V) in q's dtype, and states are (states_in,
        B, H, K, V). Without causality the sum of all states of the document, including the run's
        own, enters a run. In backward the results are the inputs' gradients, in fp32 or in the
        inputs' dtypes, and `states` (states_out, B, H, K, V) has the gradients of the states that
        leave spans.
        """


def begin_forward(inputs: Inputs, spans: SpanStates, options: Options[O]) -> HookedSteps[O, Tensor]:
    """Begin the forward; its `outgoing` is then computed."""
    make = load_backend(options.family, options.backend).Forward
    return HookedSteps(
        lambda: make(inputs, spans, options),
        inputs.q.device,
        partial(options.work, inputs, False),
        lambda: options.empty(inputs, spans.states_out),
        lambda: inputs.q.new_empty(inputs.out_shape),
    )


def begin_backward(
    inputs: Inputs, dout: Tensor, spans: SpanStates, options: Options[O], states_in: Tensor | None
) -> HookedSteps[O, Any]:
    """Begin the backward, given dout, like out, and the states that entered in forward.

    Its `outgoing` is then computed. `finish` returns at least dq, dk and dv.
    """
    make = load_backend(options.family, options.backend).Backward
    return HookedSteps(
        lambda: make(inputs, dout, spans, options, states_in),
        inputs.q.device,
        partial(options.work, inputs, True),
        lambda: options.empty(inputs, spans.states_in),
        lambda: Gradients.of(inputs, lambda x: x.new_empty(x.shape)),
    )


def request_tables(inputs: Inputs, spans: SpanStates, options: Options[O], backward: bool) -> None:
    """Request the backend's tables of a pass; a rehearsal collects them."""
    backend = load_backend(options.family, options.backend)
    request = getattr(backend, "request_tables", None)  # some backends have no tables
    if request is not None:
        request(inputs, spans, backward)


class HookedSteps(Generic[O, R]):
    """`Steps` that run through hooks, which can trace them or replace them by arbitrary results."""

    def __init__(
        self,
        make: Callable[[], Steps[O, R]],
        device: torch.device,
        work: Callable[..., LinearWork],
        nothing: Callable[[], O],
        arbitrary: Callable[[], R],
    ) -> None:
        self._device, self._work, self._arbitrary = device, work, arbitrary
        self._finish: tuple[StepName, ...] = ("local", "finish")
        self._steps = self._compute(make, "begin")
        self.outgoing = nothing() if self._steps is None else self._steps.outgoing

    def local(self) -> None:
        self._finish = ("finish",)
        self._compute(lambda: self._made.local(), "local")

    def finish(self, states: Tensor | None) -> R:
        result = self._compute(lambda: self._made.finish(states), *self._finish)
        return self._arbitrary() if result is None else result

    def _compute(self, step: Callable[[], T], *names: StepName) -> T | None:
        """Return `step()`, or None if a hook replaced it."""
        with hooks().computing(self._device, lambda: self._work(*names)) as computes:
            return step() if computes else None

    @property
    def _made(self) -> Steps[O, R]:
        assert self._steps is not None  # no hook replaced it
        return self._steps

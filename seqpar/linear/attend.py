"""The primitive of linear attention: (inputs, spans) -> out and what leaves spans; its backward.

Later tokens of a document need only one thing of a span: a state, or a map
(`states/state_options.py` and `maps/map_options.py` have the formulas). Strategies decide how
states and maps are sent between ranks. Every strategy computes only with `begin_forward` and
`begin_backward`. `inputs.py` defines the letters of shapes.
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

NOMINAL_CHUNK = 64  # rows of a chunk, in which a trace assumes that all pairs of rows are computed

StepName = Literal["begin", "local", "finish"]
T = TypeVar("T")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
O = TypeVar("O")  # noqa: E741  what leaves spans: a Tensor of states, or Maps
O_co = TypeVar("O_co", covariant=True)


class LinearWork(NamedTuple):
    """The work of one or more steps of a forward or a backward."""

    area: int  # number of (query, key) pairs that would take softmax attention as long
    share: float  # the fraction of the area of the whole pass
    tokens: int  # number of rows, over the whole batch
    heads: int  # number of states
    dims: tuple[int, int]  # (K, V) of a state
    backward: bool


class Options(ABC, Generic[O]):
    """The options of a call that change its arithmetic."""

    family: ClassVar[str]  # the family of backends (a key of `BACKENDS`)
    backend: str

    def on_meta(self) -> Self:
        """Return these options for a rehearsal, in which all operands are on the meta device."""
        return self

    @abstractmethod
    def empty(self, inputs: Inputs, count: int) -> O:
        """Return what leaves `count` spans, all zeros, in fp32 (fp64 for fp64)."""

    @abstractmethod
    def work(self, inputs: Inputs, backward: bool, *steps: StepName) -> LinearWork:
        """Return the work of these steps of a pass."""


class Steps(Protocol[O_co, R_co]):
    """A backend's forward or backward in three steps, so that an exchange fits between them.

    1. The constructor computes `outgoing`: what other spans need of each span.
    2. `local` is optional. It gives a rank work while states are sent. If it is not called,
    `finish` does this work.
    3. `finish` returns the results.

    In forward, `outgoing` has the state or the map of only the span's rows, at the index in
    `state_out`. In backward, it belongs to spans that a state enters, at the index in `state_in`.
    It is then one of two things. With states, it is the gradient of the entering state, as far as
    the gradient comes from the span's rows. With maps, it is the map from the gradient of the state
    that leaves to the gradient of the state that enters, whose transition is the transpose of
    forward's transition.
    """

    @property
    def outgoing(self) -> O_co: ...

    def local(self) -> None:
        """Compute all that does not depend on other spans."""

    def finish(self, states: Tensor | None) -> R_co:
        """Return the results, given the states that enter spans; None stands for zeros.

        In forward the result is out (B, T, max(Hq, H), V) in q's dtype, and states are (states_in,
        B, H, K, V). Without causality, the state that enters a run is the sum of all states of the
        document, including the state of the run. In backward the results are the gradients of the
        inputs, in fp32 or in the inputs' dtypes, and `states` (states_out, B, H, K, V) has the
        gradients of the states that leave spans.
        """


def begin_forward(inputs: Inputs, spans: SpanStates, options: Options[O]) -> HookedSteps[O, Tensor]:
    """Begin the forward: compute its `outgoing`."""
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

    This computes its `outgoing`. `finish` returns at least dq, dk and dv.
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
    """Request a backend's tables for a pass; a rehearsal collects the requests."""
    backend = load_backend(options.family, options.backend)
    request = getattr(backend, "request_tables", None)  # some backends have no tables
    if request is not None:
        request(inputs, spans, backward)


class HookedSteps(Generic[O, R]):
    """`Steps` that run through hooks.

    Hooks can trace steps, or replace them by arbitrary results.
    """

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
        assert self._steps is not None  # no hook replaced the constructor
        return self._steps

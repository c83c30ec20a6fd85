"""Compute linear attention within the spans of one rank, forward and backward.

A *span* is a range of consecutive tokens of a document on one rank. A *state* is a matrix for each
head, which summarises the tokens of a document so far. Later tokens of the document need only the
state of the span's own tokens (`states/state_options.py`), or the *map* of the span, which is the
function from the state before the span to the state after the span (`maps/map_options.py`).

`begin_forward` and `begin_backward` return an object that computes in several steps. Between the
steps, a strategy exchanges states or maps between ranks.
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

NOMINAL_CHUNK = 64  # rows of a chunk; traces assume that all pairs of rows of a chunk are computed

StepName = Literal["begin", "local", "finish"]
T = TypeVar("T")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
O = TypeVar("O")  # noqa: E741  what leaves spans: a Tensor of states, or Maps
O_co = TypeVar("O_co", covariant=True)


class LinearWork(NamedTuple):
    """The work of one or more steps of a pass, as hooks receive it."""

    # The number of (query, key) pairs for which softmax attention would take the same time.
    area: int
    share: float  # the fraction of the area of the whole pass
    tokens: int  # the number of rows, over the whole batch
    heads: int  # the number of states
    dims: tuple[int, int]  # the shape (K, V) of a state
    backward: bool


class Options(ABC, Generic[O]):
    """The options of a call that change its results."""

    family: ClassVar[str]  # the backends that can compute it, a key of `BACKENDS`
    backend: str

    def on_meta(self) -> Self:
        """Return these options in a form for meta tensors."""
        return self

    @abstractmethod
    def empty(self, inputs: Inputs, count: int) -> O:
        """Return zeros for the states or maps of `count` spans, in fp32 (fp64 for fp64)."""

    @abstractmethod
    def work(self, inputs: Inputs, backward: bool, *steps: StepName) -> LinearWork: ...


class Steps(Protocol[O_co, R_co]):
    """The forward or the backward of a backend, which computes in three steps.

    A *span* is a range of consecutive tokens of a document on one rank. A state *enters* the span,
    and a state *leaves* the span. Between the steps, ranks exchange states or maps. The *map* of a
    span is the function from the entering state to the leaving state.

    1. The constructor computes `outgoing`, the states or maps that other spans need.
    2. `local` computes everything that does not depend on other spans, while states are sent. If
       `local` is not called, `finish` does this work.
    3. `finish` returns the results.

    In forward, `outgoing` has the state or the map of each span's own rows, at the index
    `state_out` of the span. In backward, it has an entry for each span that a state enters, at the
    index `state_in` of the span. If ranks exchange states, this entry is the term that the span's
    own rows add to the gradient of the entering state. If ranks exchange maps, it is the map from
    the gradient of the leaving state to the gradient of the entering state.
    """

    @property
    def outgoing(self) -> O_co: ...

    def local(self) -> None:
        """Compute everything that does not depend on states of other spans."""

    def finish(self, states: Tensor | None) -> R_co:
        """Return the results of the forward or backward, given states of spans.

        A *span* is a range of consecutive tokens of a document on one rank. In forward, `states`
        (states_in, B, H, K, V) has the states before spans, and the result is out (B, T, max(Hq,
        H), V) in q's dtype. In backward, `states` (states_out, B, H, K, V) has the gradients of the
        states after spans, and the results are the gradients of the inputs, in fp32 or in the
        dtypes of the inputs. If `states` is None, all states are 0.

        Without causality, a span is all tokens of a document on one rank, and the state before the
        span is the sum over the whole document.
        """


def begin_forward(inputs: Inputs, spans: SpanStates, options: Options[O]) -> HookedSteps[O, Tensor]:
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
    """Begin the backward of a backend, and compute the states or maps that other ranks need.

    `dout` is the gradient of out. `states_in` has the states that forward received for the spans,
    the ranges of consecutive tokens of a document on this rank. The method `finish` of the result
    returns dq, dk and dv, and further gradients if the call has decays or beta.
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
    """Request the tables that a backend reads in a pass, so that a rehearsal can copy them to the
    device together.
    """
    backend = load_backend(options.family, options.backend)
    request = getattr(backend, "request_tables", None)  # some backends have no tables
    if request is not None:
        request(inputs, spans, backward)


class HookedSteps(Generic[O, R]):
    """The steps of a forward or backward. Hooks can trace the steps, or replace their results with
    arbitrary values.
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
        with hooks().computing(self._device, lambda: self._work(*names)) as computes:
            return step() if computes else None

    @property
    def _made(self) -> Steps[O, R]:
        # a hook that replaces steps would have replaced the constructor, too
        assert self._steps is not None
        return self._steps

"""The recurrent primitive: (inputs, spans) -> out and maps, and its backward.

Each token's step is affine in the state (`kinds`), so a span collapses to one map (`maps`): that is
all that later tokens of its document need of it. Maps of consecutive spans compose, in any
grouping. What moves between ranks is a transport's business; every transport computes with
`begin_forward` and `begin_backward` alone. `inputs` has the legend of shapes.

A span without an entering state (`state_in` −1) gets a transition of 0, and so does in backward a
span whose leaving state has no gradient (`state_out` −1): for the delta rule a transition is a
matrix, and computing it costs as much as the state. So on two ranks with one document no rank
computes one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol, TypeVar

from torch import Tensor

from seqpar.attention.backend import load_backend
from seqpar.linear.inputs import Gradients, Inputs
from seqpar.linear.kinds import Kind
from seqpar.linear.maps.maps import Maps, empty_maps
from seqpar.linear.routes import SpanStates
from seqpar.linear.steps import NOMINAL_CHUNK, HookedSteps


@dataclass(frozen=True)
class MapOptions:
    """The options of a call that change its arithmetic.

    Attributes:
        scale: what q·k is multiplied by.
        backend: the backend's name.
    """

    scale: float
    backend: str


def backend(name: str) -> ModuleType:
    """Return the module of a recurrent backend."""
    return load_backend("recurrent", name)


class ForwardSteps(Protocol):
    """A forward in three steps, so that an exchange of maps fits between them.

    The first is the constructor, which computes `maps`: one for each span that a state leaves, by
    the index in `state_out`. `local` is optional: it gives a rank work while maps travel, which
    `finish` does otherwise.
    """

    maps: Maps

    def local(self) -> None:
        """Compute all that does not depend on the states that enter spans."""

    def finish(self, states_in: Tensor | None) -> Tensor:
        """Return out (B, T, max(Hq, H), V) in q's dtype, given the states that enter spans.

        `states_in` is (states_in, B, H, K, V), or None: they are 0.
        """


class BackwardSteps(Protocol):
    """A backward in three steps, like `ForwardSteps`.

    `maps` has one for each span that a state enters, by the index in `state_in`: the gradient of
    the state that enters is `transition` times the gradient of the state that leaves, plus `state`,
    which comes through the span's rows. So a transition here is the transpose of forward's.
    """

    maps: Maps

    def local(self) -> None:
        """Compute all that does not depend on the gradients of states that leave spans."""

    def finish(self, dstates_out: Tensor | None) -> Gradients:
        """Return the inputs' gradients, given those of the states that leave spans.

        `dstates_out` is (states_out, B, H, K, V), or None: they are 0. The gradient of the states
        that enter is in `maps`.
        """


def begin_forward(
    kind: Kind, inputs: Inputs, spans: SpanStates, options: MapOptions
) -> ForwardSteps:
    """Begin the forward of `inputs`; its `maps` are then computed."""
    make = backend(options.backend).Forward
    return _HookedSteps[ForwardSteps, Tensor](
        lambda: make(kind, inputs, spans, options),
        kind,
        inputs,
        spans.states_out,
        lambda: inputs.q.new_empty(inputs.out_shape),
        backward=False,
    )


def begin_backward(
    kind: Kind,
    inputs: Inputs,
    dout: Tensor,
    spans: SpanStates,
    options: MapOptions,
    states_in: Tensor | None,
) -> BackwardSteps:
    """Begin the backward, given dout, like out, and the states that entered in forward.

    Its `maps` are then computed.
    """
    make = backend(options.backend).Backward
    return _HookedSteps[BackwardSteps, Gradients](
        lambda: make(kind, inputs, dout, spans, options, states_in),
        kind,
        inputs,
        spans.states_in,
        lambda: Gradients.of(inputs, lambda x: x.new_empty(x.shape)),
        backward=True,
    )


S = TypeVar("S", ForwardSteps, BackwardSteps)
R = TypeVar("R")


class _HookedSteps(HookedSteps[S, R]):
    """Steps that count as a third of the pass each, since their shares depend on the backend."""

    def __init__(
        self,
        make: Callable[[], S],
        kind: Kind,
        inputs: Inputs,
        maps: int,
        arbitrary: Callable[[], R],
        backward: bool,
    ) -> None:
        batch, heads, dim, value_dim = inputs.state_shape
        rows = batch * inputs.q.shape[1]
        super().__init__(inputs.q.device, (rows, heads, (dim, value_dim), backward), arbitrary)
        # A row's products with the state, and with the rows of its chunk, in three equal steps.
        with_state = dim * value_dim // (dim + value_dim) * (2 if kind.uses_beta else 1)
        each = (with_state + NOMINAL_CHUNK) * (2 if backward else 1)
        self._area = rows * heads * each * 2 // 3
        self.steps = self.compute(self._area, 1 / 3, make)
        self.maps: Maps = empty_maps(kind, inputs, maps) if self.steps is None else self.steps.maps

    def local(self) -> None:
        self.compute(self._area, 1 / 3, lambda: self.made.local())

    def finish(self, states: Tensor | None) -> R:
        result = self.compute(self._area, 1 / 3, lambda: self.made.finish(states))
        return self._arbitrary() if result is None else result  # type: ignore[return-value]

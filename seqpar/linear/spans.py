"""Spans with the states that enter and leave them, as both primitives read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from seqpar.core.arguments import Ints
from seqpar.core.memo import Memo


@dataclass(frozen=True, eq=False)
class SpanStates:
    """A rank's spans, and which states enter and leave them.

    Tensors of states have only those that are needed, so each span has indices into them. Without
    causality runs take the place of spans.

    Attributes:
        edges: (spans + 1,) span i is rows edges[i] … edges[i + 1] − 1.
        state_in: (spans,) the index of the state that enters the span, among all that enter spans;
            −1: none does.
        state_out: (spans,) the index of the state that leaves the span, among all that leave spans;
            −1: no rank needs it.
        derived: what backends derive from the spans.
    """

    edges: Ints
    state_in: Ints
    state_out: Ints
    derived: Memo = field(default_factory=Memo, repr=False)

    @cached_property
    def states_in(self) -> int:
        """How many states enter spans."""
        return int((self.state_in >= 0).sum())

    @cached_property
    def states_out(self) -> int:
        """How many states leave spans."""
        return int((self.state_out >= 0).sum())

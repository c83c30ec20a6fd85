"""The options of calls in which ranks exchange maps.

A *span* is a range of consecutive tokens of a document on one rank. The *map* of a span is the
affine function from the state before the span to the state after the span (`maps.py`). Maps of
consecutive spans can be combined in any grouping.

The *transition* of a span is the linear part of its map. With the delta rule, a transition is a
matrix, and computing it takes as long as computing the state. If no state is multiplied with a
transition, the transition is not computed, and is set to 0. In forward, this is the case if no
state enters the span (`state_in` is −1). In backward, this is the case if the state that leaves the
span has no gradient (`state_out` is −1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from seqpar.core.dtypes import accumulator_dtype
from seqpar.linear.attend import NOMINAL_CHUNK, LinearWork, Options, StepName
from seqpar.linear.inputs import Inputs
from seqpar.linear.kinds import Kind
from seqpar.linear.maps.maps import Maps, transition_shape


@dataclass(frozen=True)
class MapOptions(Options[Maps]):
    family = "recurrent"
    kind: Kind
    scale: float  # the factor of q·k
    backend: str

    def empty(self, inputs: Inputs, count: int) -> Maps:
        batch, heads, dim, value_dim = inputs.state_shape
        zeros = partial(inputs.q.new_zeros, dtype=accumulator_dtype(inputs.q.dtype))
        transition = zeros((count, batch, heads, *transition_shape(self.kind, dim)))
        return Maps(transition, zeros((count, batch, heads, dim, value_dim)))

    def work(self, inputs: Inputs, backward: bool, *steps: StepName) -> LinearWork:
        """Return the work of one or more steps of a pass.

        Each of the three steps counts as a third of the pass, because the actual fractions depend
        on the backend.
        """
        batch, heads, dim, value_dim = inputs.state_shape
        rows = batch * inputs.q.shape[1]
        # The products of a row with the state, and with the other rows of its chunk.
        with_state = dim * value_dim // (dim + value_dim) * (2 if self.kind.uses_beta else 1)
        each = (with_state + NOMINAL_CHUNK) * (2 if backward else 1)
        return LinearWork(
            rows * heads * each * 2 // 3, 1 / 3, rows, heads, (dim, value_dim), backward
        )

"""The options of calls that exchange maps, and why exchanging maps suffices.

Each token's step is affine in the state (`kinds.py`). A span therefore collapses to one map
(`maps.py`), which is all that later tokens of its document need of the span. Maps of consecutive
spans compose, in any grouping.

For the delta rule a transition is a matrix, and computing it costs as much as computing the state.
It is therefore left out, and 0, where nothing multiplies it: in forward for a span without an
entering state (`state_in` −1), and in backward for a span whose leaving state has no gradient
(`state_out` −1). On two ranks with one document, no rank computes a transition.
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
        """Return the work of steps.

        Each step counts as a third of the pass, since the actual fractions depend on the backend.
        """
        batch, heads, dim, value_dim = inputs.state_shape
        rows = batch * inputs.q.shape[1]
        # The products of a row with the state, and with the rows of its chunk.
        with_state = dim * value_dim // (dim + value_dim) * (2 if self.kind.uses_beta else 1)
        each = (with_state + NOMINAL_CHUNK) * (2 if backward else 1)
        return LinearWork(
            rows * heads * each * 2 // 3, 1 / 3, rows, heads, (dim, value_dim), backward
        )

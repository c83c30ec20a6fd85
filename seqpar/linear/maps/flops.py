"""Count the FLOPs of the operators of recurrent attention, for torch's FlopCounterMode.

They are those of the recurrence, as in `seqpar.linear.flops`; by the delta rule a token also reads
the state with its key, which doubles the products of states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import seqpar.linear.maps.operator  # noqa: F401  defines the operators
from seqpar.attention.operators import FLOP_FORMULAS
from seqpar.linear.inputs import Inputs


def _forward(*tensors_and_carried: Any, out_val: Any = None) -> int:
    outputs, states = _products(Inputs(*tensors_and_carried[: len(Inputs._fields)]))
    return outputs + states


def _backward(
    dout: Tensor | None, dfinal: Tensor | None, *tensors_and_carried: Any, out_val: Any = None
) -> int:
    outputs, states = _products(Inputs(*tensors_and_carried[: len(Inputs._fields)]))
    return 2 * outputs + 3 * states


def _products(inputs: Inputs) -> tuple[int, int]:
    """Return the FLOPs of forward's products for outputs, and of those for states."""
    batch, rows, heads, value_dim = inputs.out_shape
    per_head = 2 * batch * rows * inputs.q.shape[3] * value_dim
    return per_head * heads, per_head * inputs.heads * (1 if inputs.beta is None else 2)


FLOP_FORMULAS[torch.ops.seqpar.recurrent_attention] = _forward
FLOP_FORMULAS[torch.ops.seqpar.recurrent_attention_backward] = _backward

"""Count the FLOPs of the operators of softmax attention, for torch's FlopCounterMode.

The count is exact for the pairs that this rank computes. Forward multiplies q by k, and the
probabilities by v. Backward multiplies q by k again, and has four more products. A multiplication
with an addition is 2 FLOPs. Like torch, it does not count the softmax itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import seqpar.softmax.operator  # noqa: F401  defines the operators that are counted
from seqpar.attention.operands import OperandShape
from seqpar.attention.operators import FLOP_FORMULAS
from seqpar.comm.binding import BoundStrategy
from seqpar.softmax.call import CallArguments
from seqpar.softmax.strategy import Strategy


def forward_flops(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *carried: object, out_val: object = None
) -> int:
    shape = OperandShape.of(q, k, v)
    return 2 * _area(shape, carried, backward=False) * (shape.dim + shape.value_dim)


def _backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    sinks: Tensor | None,
    sink_inputs: list[Tensor],
    residuals: list[Tensor],
    numbers: Tensor,
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
    *carried: object,
    out_val: object = None,
) -> int:
    shape = OperandShape.of_sizes(residuals[0].dtype, q_shape, k_shape, v_shape)
    return backward_flops(shape, carried)


def backward_flops(shape: OperandShape, carried: tuple[object, ...]) -> int:
    return 2 * _area(shape, carried, backward=True) * (3 * shape.dim + 2 * shape.value_dim)


def _area(shape: OperandShape, carried: tuple[object, ...], backward: bool) -> int:
    """Return the number of pairs that this rank computes, in all heads and batch entries."""
    arguments = CallArguments._make(carried)
    bound: BoundStrategy[Strategy] = BoundStrategy.of(arguments.strategy)
    call = arguments.to_call(bound.comm, shape, has_sinks=False)
    areas = bound.strategy.backward_areas if backward else bound.strategy.areas
    return shape.batch * sum(areas(call, bound.comm.rank))


FLOP_FORMULAS[torch.ops.seqpar.attention] = forward_flops
FLOP_FORMULAS[torch.ops.seqpar.attention_backward] = _backward

"""Count the FLOPs of the operators of softmax attention, for torch's FlopCounterMode.

They are those that the mask's area asks of this rank, exactly: forward multiplies q by k, and the
probabilities by v; backward does the first again, and has four more products. A multiplication and
an addition are 2 FLOPs; what the softmax takes is not counted, as torch does not.
"""

from __future__ import annotations

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
    number: Tensor,
    q_shape: list[int],
    k_shape: list[int],
    v_shape: list[int],
    *carried: object,
    out_val: object = None,
) -> int:
    batch, _, heads, dim = q_shape
    shape = OperandShape(residuals[0].dtype, batch, heads, k_shape[2], dim, v_shape[3])
    return backward_flops(shape, carried)


def backward_flops(shape: OperandShape, carried: tuple[object, ...]) -> int:
    """Return the FLOPs of a backward of operands of this shape."""
    return 2 * _area(shape, carried, backward=True) * (3 * shape.dim + 2 * shape.value_dim)


def _area(shape: OperandShape, carried: tuple[object, ...], backward: bool) -> int:
    """Return how many pairs this rank computes, in all heads of all batch entries."""
    arguments = CallArguments._make(carried)
    bound: BoundStrategy[Strategy] = BoundStrategy.of(arguments.strategy)
    call = arguments.to_call(bound.comm, shape, has_sinks=False)
    areas = bound.strategy.backward_areas if backward else bound.strategy.areas
    return shape.batch * sum(areas(call, bound.comm.rank))


FLOP_FORMULAS[torch.ops.seqpar.attention] = forward_flops
FLOP_FORMULAS[torch.ops.seqpar.attention_backward] = _backward

"""Count the FLOPs of calls in two parts, for torch's FlopCounterMode."""

from __future__ import annotations

import torch
from torch import Tensor

import seqpar.softmax.tasks.split_operator  # noqa: F401  defines the operators that are counted
from seqpar.attention.operands import OperandShape
from seqpar.attention.operators import FLOP_FORMULAS
from seqpar.softmax.flops import backward_flops, forward_flops


def _finish(
    ticket: Tensor,
    sinks: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *carried: object,
    out_val: object = None,
) -> int:
    return forward_flops(q, k, v, sinks, *carried)


def _finish_backward(
    number: int,
    dout: Tensor | None,
    dlse: Tensor | None,
    sinks: Tensor | None,
    saved: list[Tensor],
    numbers: Tensor,
    *carried: object,
    out_val: object = None,
) -> int:
    """Count a backward where it begins, because only this operator gets the layout."""
    return backward_flops(OperandShape.of(*saved[:3]), carried)


FLOP_FORMULAS[torch.ops.seqpar.attention_finish] = _finish
FLOP_FORMULAS[torch.ops.seqpar.attention_finish_backward] = _finish_backward

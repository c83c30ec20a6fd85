"""Faults that have occurred in sequence-parallel attention. Each function injects one of them.

A comparison with one process must find each fault: `train_lm.py --compare --inject-fault NAME`,
or `train_hybrid.py` for faults of linear attention.
"""

from collections.abc import Callable

import torch

from seqpar.layout.masks.mask import Mask, Slices
from seqpar.linear.states.state_options import StateOptions
from seqpar.linear.states.sums import Gathering, Sum
from seqpar.softmax.backends import aten
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import OutputGradient, Partial, PartialGradients

Faults = dict[str, Callable[[], None]]


def bf16_partials() -> None:
    """Keep partial results in bf16 between merges."""
    merge = Partial.merge

    def rounded(
        self: Partial, rows: slice, out: torch.Tensor, lse: torch.Tensor, is_owned: bool = False
    ) -> None:
        merge(self, rows, out, lse, is_owned)
        self.out[:, rows] = self.out[:, rows].bfloat16().to(self.out.dtype)

    Partial.merge = rounded  # type: ignore[method-assign]


def bf16_dkdv() -> None:
    """Keep the gradients of keys and values in bf16 between contributions."""
    backward = aten.backward

    def rounded(
        output: OutputGradient,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slices: Slices,
        gradients: PartialGradients,
        options: CallOptions,
    ) -> None:
        backward(output, q, k, v, slices, gradients, options)
        for x in (gradients.dk, gradients.dv):
            x.copy_(x.bfloat16())

    aten.backward = rounded


def lost_merge_row() -> None:
    """Omit the first row of each merge."""
    merge = Partial.merge

    def losing(
        self: Partial, rows: slice, out: torch.Tensor, lse: torch.Tensor, is_owned: bool = False
    ) -> None:
        merge(self, slice(rows.start + 1, rows.stop), out[:, 1:], lse[:, 1:], is_owned)

    Partial.merge = losing  # type: ignore[method-assign]


def lse_error() -> None:
    """Make the log-sum-exp of each partial result 0.1% too large."""
    merge = Partial.merge

    def scaled(
        self: Partial, rows: slice, out: torch.Tensor, lse: torch.Tensor, is_owned: bool = False
    ) -> None:
        merge(self, rows, out, lse * 1.001, is_owned)

    Partial.merge = scaled  # type: ignore[method-assign]


def mask_off_by_one() -> None:
    """Extend the mask of each query by the next token's key."""
    of = Mask.of

    def shifted(*arguments: object) -> Mask:
        mask = of(*arguments)  # type: ignore[arg-type]
        return Mask(mask.left, mask.right + 1, mask.prefix)

    Mask.of = shifted  # type: ignore[method-assign, assignment]


def state_dropped() -> None:
    """Ignore the tokens before a span: their states arrive, but are not added."""
    weigh = Gathering.weigh

    def losing(self: Gathering, options: StateOptions) -> list[Sum]:
        compose, arrive, *added_up = weigh(self, options)
        return [compose, lambda states: torch.zeros_like(arrive(states)), *added_up]

    Gathering.weigh = losing  # type: ignore[method-assign]


def by_name(*faults: Callable[[], None]) -> Faults:
    """Return faults by their names on the command line."""
    return {fault.__name__.replace("_", "-"): fault for fault in faults}


FAULTS = by_name(bf16_partials, bf16_dkdv, lost_merge_row, lse_error, mask_off_by_one)
LINEAR_FAULTS = by_name(state_dropped)

"""Faults that sequence-parallel attention has had in the wild, to plant in this process: a run that checks its results
must notice each (`train_lm.py --inject-fault NAME`; those of linear attention: `train_hybrid.py`)."""

from collections.abc import Callable

import torch

from seqpar.attend import Gradients, Partial, Scoring, Upstream
from seqpar.backends import aten
from seqpar.linear import Recurrence
from seqpar.mask import Mask, Slices
from seqpar.strategies.states import Route

Faults = dict[str, Callable[[], None]]


def bf16_partials() -> None:
    """Partial results are kept in bf16 between merges."""
    merge = Partial.merge

    def rounded(self: Partial, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        merge(self, rows, out, lse)
        self.out[:, rows] = self.out[:, rows].bfloat16().to(self.out.dtype)

    Partial.merge = rounded  # type: ignore[method-assign]


def bf16_dkdv() -> None:
    """The gradients of keys and values are kept in bf16 between contributions."""
    backward = aten.backward

    def rounded(
        up: Upstream, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slices: Slices, gradients: Gradients, scoring: Scoring
    ) -> None:
        backward(up, q, k, v, slices, gradients, scoring)
        for x in (gradients.dk, gradients.dv):
            x.copy_(x.bfloat16())

    aten.backward = rounded


def lost_merge_row() -> None:
    """The first row of each merge is left out."""
    merge = Partial.merge

    def losing(self: Partial, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        merge(self, slice(rows.start + 1, rows.stop), out[:, 1:], lse[:, 1:])

    Partial.merge = losing  # type: ignore[method-assign]


def lse_error() -> None:
    """The log-sum-exp of each partial is 0.1% too large."""
    merge = Partial.merge

    def scaled(self: Partial, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        merge(self, rows, out, lse * 1.001)

    Partial.merge = scaled  # type: ignore[method-assign]


def mask_off_by_one() -> None:
    """A query sees one key too many: its own successor."""
    of = Mask.of

    def shifted(*arguments: object) -> Mask:
        mask = of(*arguments)  # type: ignore[arg-type]
        return Mask(mask.left, mask.right + 1, mask.prefix)

    Mask.of = shifted  # type: ignore[method-assign, assignment]


def state_dropped() -> None:
    """What came before a span is lost: states arrive, and are not added."""

    def losing(self: Route, sums: torch.Tensor, composed: torch.Tensor, recurrence: Recurrence) -> None:
        pass

    Route.arrive = losing  # type: ignore[method-assign]


def by_name(*faults: Callable[[], None]) -> Faults:
    return {fault.__name__.replace("_", "-"): fault for fault in faults}


FAULTS = by_name(bf16_partials, bf16_dkdv, lost_merge_row, lse_error, mask_off_by_one)
LINEAR_FAULTS = by_name(state_dropped)

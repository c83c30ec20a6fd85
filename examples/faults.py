"""Faults that sequence-parallel attention has had in the wild, to plant in this process: a run that checks its results
must notice each (`train_lm.py --inject-fault NAME`; those of linear attention: `train_hybrid.py`)."""

from collections.abc import Callable

import torch

import seqpar
from seqpar.attend import Gradients, Partial, Scoring, Upstream
from seqpar.backends import aten
from seqpar.mask import Mask, Slices

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
    """Linear attention begins each span with an empty state, as if it were a document of its own."""
    forward = seqpar.LASP2Attention.forward

    def forgetting(
        self: seqpar.LASP2Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: seqpar.Layout, **options: object
    ) -> torch.Tensor:
        first = layout.cu_seqlens.tolist()
        spans = [[(first[s.document] + s.start, s.stop - s.start) for s in layout.spans(r)] for r in range(layout.ranks)]
        cuts = sorted({0, layout.tokens, *(start for held in spans for start, _ in held)})
        alone = [[(cuts.index(start), 0, length) for start, length in held] for held in spans]
        return forward(self, q, k, v, seqpar.Layout.from_spans(alone, cuts), **options)

    seqpar.LASP2Attention.forward = forgetting  # type: ignore[method-assign]


def by_name(*faults: Callable[[], None]) -> Faults:
    return {fault.__name__.replace("_", "-"): fault for fault in faults}


FAULTS = by_name(bf16_partials, bf16_dkdv, lost_merge_row, lse_error, mask_off_by_one)
LINEAR_FAULTS = by_name(state_dropped)

"""Choose a strategy for a call of attention, by simulating what the call may go through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.attention.backend import use_backend
from seqpar.attention.operands import OperandShape
from seqpar.comm.messages.exchange import Comm
from seqpar.costs.cluster import Cluster
from seqpar.layout.layout import Layout
from seqpar.simulate.candidates import Candidate, table
from seqpar.simulate.playback.op_costs import Pricing
from seqpar.simulate.playback.outcome import AS_FAST, Outcome, slower_by
from seqpar.simulate.playback.playing import play
from seqpar.simulate.recording.recording import record


class CandidatePrediction(NamedTuple):
    """What a call through a candidate is predicted to take, or why it cannot be.

    Attributes:
        candidate: the strategy and its mesh.
        seconds: until the last rank is done, forward and backward; ∞ if it cannot be.
        sent_bytes: of the rank that sends most.
        limit: what takes most of the time: "compute", "imbalance" or "communication".
        why_not: why another one is better, or why this one cannot be; empty of the first.
        measured: the seconds that the call took on the group's ranks, if it was measured there.
    """

    candidate: Candidate
    seconds: float = torch.inf
    sent_bytes: int = 0
    limit: str = ""
    why_not: str = ""
    measured: float | None = None


@dataclass(frozen=True)
class Choice:
    """What was chosen for a call, and why: `str()` of it is a table.

    Attributes:
        ranked: all predictions, the fastest first; what cannot be comes last. Those that were
            measured come before the others, by what they took.
        cluster: the name of the cluster that they are for.
    """

    ranked: tuple[CandidatePrediction, ...]
    cluster: str

    @property
    def candidate(self) -> Candidate:
        """The strategy that was chosen, with its mesh."""
        return self.ranked[0].candidate

    @property
    def strategy(self) -> str:
        """The name of the strategy that was chosen."""
        return self.candidate.strategy

    @property
    def seconds(self) -> float:
        """What the call is predicted to take."""
        return self.ranked[0].seconds

    def __str__(self) -> str:
        names = "strategy", "ms", "measured, ms", "sent, MB", "limit", "why not"
        rows: list[tuple[str, ...]] = [names]
        for x in self.ranked:
            can = x.seconds < torch.inf
            figures = (f"{x.seconds * 1e3:.4g}", f"{x.sent_bytes / 1e6:.4g}") if can else ("", "")
            taken = "" if x.measured is None else f"{x.measured * 1e3:.4g}"
            rows.append((str(x.candidate), figures[0], taken, figures[1], x.limit, x.why_not))
        return f"on {self.cluster}:\n{table(rows)}"


def choose(
    cluster: Cluster,
    found: Sequence[Candidate],
    shape: OperandShape,
    layout: Layout,
    *,
    backward: bool = True,
    pricing: Pricing | None = None,
    ordered: bool | None = None,
    **call: Any,
) -> Choice:
    """Return the candidates, ranked by what a call is simulated to take on a cluster.

    The same arguments give the same choice. Nothing is computed or sent.

    Args:
        cluster: the devices and their links.
        found: the candidates, in the order in which equals are ranked.
        shape: of the operands.
        layout: which rank holds which tokens.
        backward: whether the call's gradients are computed too.
        pricing: as in `play`.
        ordered: as in `record`. None: where messages travel while devices compute.
        call: the call's other arguments; tensors among them are not on a device of ranks.

    Raises:
        ValueError: if no candidate can compute the call, with the reason of each.
    """
    rows = []
    for each in found:
        code = _code(each, shape, layout, backward, call)
        order = cluster.overlaps if ordered is None else ordered
        rows.append(_predicted(each, cluster, layout, code, pricing, order))
    rows.sort(key=lambda x: x[0].seconds)  # what is as fast stays in order
    (first, best), *losers = rows
    if best is None:
        reasons = {x.why_not for x, _ in rows}
        if len(reasons) == 1:
            raise ValueError(*reasons)
        listed = "; ".join(f"{x.candidate}: {x.why_not}" for x, _ in rows)
        raise ValueError(f"no strategy can compute this call: {listed}")
    ranked = [x if other is None else _compared(x, other, first, best) for x, other in losers]
    return Choice((first, *ranked), cluster.name)


def _code(
    candidate: Candidate, shape: OperandShape, layout: Layout, backward: bool, call: dict[str, Any]
) -> Callable[[Comm], None]:
    """Return the code of a rank."""
    kv_layout = call.get("kv_layout") or layout

    def empty(tokens: int, heads: int, dim: int) -> Tensor:
        size = shape.batch, tokens, heads, dim
        return torch.empty(size, dtype=shape.dtype, device="meta", requires_grad=backward)

    def code(comm: Comm) -> None:
        q = empty(layout.tokens_on(comm.rank), shape.heads, shape.dim)
        keys = kv_layout.tokens_on(comm.rank)
        k, v = (empty(keys, shape.kv_heads, dim) for dim in (shape.dim, shape.value_dim))
        out = candidate.make(comm)(q, k, v, layout, **call)
        if backward:
            out.backward(torch.empty_like(out))

    return code


def _predicted(
    candidate: Candidate,
    cluster: Cluster,
    layout: Layout,
    code: Callable[[Comm], None],
    pricing: Pricing | None,
    ordered: bool,
) -> tuple[CandidatePrediction, Outcome | None]:
    """Return what a candidate is predicted to take, and how."""
    # the ranks' backend may not take tensors without data, and it changes no price
    with torch.enable_grad(), use_backend("aten"):
        try:
            programs = record(code, layout.ranks, ordered=ordered)
        except ValueError as refusal:
            return CandidatePrediction(candidate, why_not=str(refusal)), None
    outcome = play(programs, cluster, pricing=pricing)
    sent = int(outcome.sent_bytes.max())
    return CandidatePrediction(candidate, outcome.seconds, sent, outcome.limit), outcome


def _compared(
    x: CandidatePrediction, outcome: Outcome, first: CandidatePrediction, best: Outcome
) -> CandidatePrediction:
    """Return a prediction that says why it is not the best."""
    slower = slower_by(x.seconds, first.seconds)
    if slower != AS_FAST:
        slower += f": {outcome.why_slower(best)}"
    return x._replace(why_not=slower)

"""Choose a strategy for an attention call by simulating the call with each candidate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.attention.operands import OperandShape
from seqpar.comm.messages.comm import Comm
from seqpar.core.compiling import outside_graphs
from seqpar.core.torch_private import beside_the_caller
from seqpar.costs.cluster import Cluster, as_cluster
from seqpar.layout.layout import Layout
from seqpar.simulate.candidates import Candidate, table
from seqpar.simulate.playback.one_rank import seconds_in_step
from seqpar.simulate.playback.op_costs import Pricing, computes, price
from seqpar.simulate.playback.outcome import AS_FAST, Outcome, slower_by
from seqpar.simulate.playback.playing import play
from seqpar.simulate.recording.program import Program
from seqpar.simulate.recording.recording import record

# In larger groups, recording and playing all ranks would take too long.
MAX_SIMULATED_RANKS = 128


class CandidatePrediction(NamedTuple):
    """The predicted time of a call with one candidate, or the reason why it is impossible."""

    candidate: Candidate  # the strategy and its mesh
    # Forward and backward, until the last rank ends; ∞ if it is impossible.
    seconds: float = torch.inf
    sent_bytes: int = 0  # bytes sent by the rank that sends the most
    limit: str = ""  # the largest part of the time: "compute", "imbalance" or "communication"
    # Why this candidate is worse than the best one, or impossible; "" for the best.
    why_not: str = ""
    measured: float | None = None  # the seconds that the call took on the group's ranks


@dataclass(frozen=True)
class SimulatedCall:
    """A call of attention on tensors without data, which any candidate can compute."""

    shape: OperandShape
    layout: Layout
    options: dict[str, object]  # the arguments of the call besides operands and layout
    backward: bool = True  # whether gradients are also computed

    def record(
        self,
        candidate: Candidate,
        *,
        ordered: bool,
        check: Callable[[], None] = lambda: None,
        only: Sequence[int] | None = None,
    ) -> list[Program]:
        """Return the call's programs with a candidate. `check` is called before each rank is
        recorded.

        `ordered` and `only` are as in `simulate.record`.
        """
        shape, layout = self.shape, self.layout
        kv_layout = self.options.get("kv_layout")
        if not isinstance(kv_layout, Layout):
            kv_layout = layout

        def empty(tokens: int, heads: int, dim: int) -> Tensor:
            size = shape.batch, tokens, heads, dim
            return torch.empty(size, dtype=shape.dtype, device="meta", requires_grad=self.backward)

        def code(comm: Comm) -> None:
            check()
            q = empty(layout.tokens_on(comm.rank), shape.heads, shape.dim)
            keys = kv_layout.tokens_on(comm.rank)
            k, v = (empty(keys, shape.kv_heads, dim) for dim in (shape.dim, shape.value_dim))
            # `forward` is called instead of the module, because global module hooks, such as those
            # of FlopCounterMode, would add operators.
            attend: Callable[..., Any] = candidate.make(comm).forward
            out = attend(q, k, v, layout, **self.options)
            if self.backward:
                out.backward(torch.empty_like(out))

        return record(code, layout.ranks, only=only, ordered=ordered)


@dataclass(frozen=True)
class Choice:
    """The strategy chosen for a call, with the reasons. `str(choice)` is a table.

    Attributes:
        ranked: all predictions, best first. Measured candidates come first, in the order of their
            measured times. Candidates that were only predicted come next, in the order of their
            predicted times. Impossible candidates come last.
        cluster: the name of the simulated cluster.
    """

    ranked: tuple[CandidatePrediction, ...]
    cluster: str

    @property
    def candidate(self) -> Candidate:
        """The chosen strategy and its mesh."""
        return self.ranked[0].candidate

    @property
    def strategy(self) -> str:
        """The name of the chosen strategy."""
        return self.candidate.strategy

    @property
    def seconds(self) -> float:
        """The predicted seconds of the call."""
        return self.ranked[0].seconds

    def __str__(self) -> str:
        names = "strategy", "ms", "measured, ms", "sent, MB", "limit", "why not"
        rows: list[tuple[str, ...]] = [names]
        for x in self.ranked:
            is_possible = x.seconds < torch.inf
            predicted = f"{x.seconds * 1e3:.4g}" if is_possible else ""
            sent = f"{x.sent_bytes / 1e6:.4g}" if is_possible else ""
            measured = "" if x.measured is None else f"{x.measured * 1e3:.4g}"
            rows.append((str(x.candidate), predicted, measured, sent, x.limit, x.why_not))
        return f"on {self.cluster}:\n{table(rows)}"


@outside_graphs
@beside_the_caller()
def choose(
    cluster: Cluster | str,
    found: Sequence[Candidate],
    shape: OperandShape,
    layout: Layout,
    *,
    backward: bool = True,
    pricing: Pricing | None = None,
    ordered: bool | None = None,
    **call: object,
) -> Choice:
    """Return the candidates ranked by the simulated time of a call on a cluster.

    Equal arguments give equal choices. No numbers are computed and no data is sent. On more than
    128 devices, only four ranks are simulated, and their peers are assumed to post messages at the
    same times (`seconds_in_step`). In this case, a candidate is impossible if its tensors exceed
    the memory of a device.

    Args:
        cluster: the devices and their links, or the name of a preset.
        found: the candidates. Equally fast candidates keep this order.
        shape: the shapes of the operands.
        layout: which rank holds which tokens.
        backward: whether the call's gradients are also computed.
        pricing: as in `play`.
        ordered: as in `record`. By default, this is True if the cluster's devices send messages
            while they compute.
        call: the remaining arguments of the call. Tensors among these arguments must not be on the
            devices of the ranks.

    Raises:
        ValueError: if no candidate can compute the call. The message has a reason for each
            candidate.
    """
    cluster = as_cluster(cluster)
    if ordered is None:
        ordered = cluster.overlaps
    simulated_call = SimulatedCall(shape, layout, call, backward)
    some = _observed(layout.ranks, cluster) if cluster.overlaps and pricing is None else None

    def simulated(candidate: Candidate) -> tuple[CandidatePrediction, Outcome | None]:
        try:
            programs = simulated_call.record(candidate, ordered=ordered, only=some)
        except ValueError as refusal:
            return CandidatePrediction(candidate, why_not=str(refusal)), None
        if some is not None:
            return _in_step(candidate, dict(zip(some, programs, strict=True)), cluster), None
        outcome = play(programs, cluster, pricing=pricing)
        sent = int(outcome.sent_bytes.max())
        return CandidatePrediction(candidate, outcome.seconds, sent, outcome.limit), outcome

    ranked = sorted(map(simulated, found), key=lambda x: x[0].seconds)  # a stable sort
    (first, best), *losers = ranked
    if first.seconds == torch.inf:
        reasons = {x.why_not for x, _ in ranked}
        if len(reasons) == 1:
            raise ValueError(*reasons)
        listed = "; ".join(f"{x.candidate}: {x.why_not}" for x, _ in ranked)
        raise ValueError(f"no strategy can compute this call: {listed}")
    compared = (
        x if x.seconds == torch.inf else _compared(x, outcome, first, best) for x, outcome in losers
    )
    return Choice((first, *compared), cluster.name)


def _observed(ranks: int, cluster: Cluster) -> tuple[int, ...] | None:
    """Return the ranks whose computations and messages are recorded: the first rank, the last rank,
    and two ranks of a node in the middle.

    For a small number of ranks, return None, which stands for all ranks.
    """
    if ranks <= MAX_SIMULATED_RANKS:
        return None
    size = cluster.devices_per_node
    first = ranks // 2 // size * size
    return tuple(sorted({0, first, min(first + size, ranks) - 1, ranks - 1}))


def _in_step(
    candidate: Candidate, programs: dict[int, Program], cluster: Cluster
) -> CandidatePrediction:
    peak = max(x.peak_bytes for x in programs.values())
    if peak > cluster.device.memory:
        sizes = f"{peak / 1e9:.4g} GB, and a device has {cluster.device.memory / 1e9:.4g} GB"
        return CandidatePrediction(candidate, why_not=f"a rank's new tensors need {sizes}")
    seconds, rank = max((seconds_in_step(x, i, cluster), i) for i, x in programs.items())
    computing = sum(price(cluster.device, computes([programs[rank]])).values())
    limit = "compute" if 2 * computing >= seconds else "communication"
    sent = max(x.sent_bytes for x in programs.values())
    return CandidatePrediction(candidate, seconds, sent, limit)


def _compared(
    x: CandidatePrediction,
    outcome: Outcome | None,
    first: CandidatePrediction,
    best: Outcome | None,
) -> CandidatePrediction:
    slower = slower_by(x.seconds, first.seconds)
    if slower != AS_FAST and outcome is not None and best is not None:
        slower += f": {outcome.why_slower(best)}"
    return x._replace(why_not=slower)

"""The options of a page, from an address or a command line, and the answer that the page shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any
from urllib.parse import urlencode

import numpy as np

from seqpar.attention.operands import OperandShape
from seqpar.auto.choosing import SimulatedCall
from seqpar.core.arguments import Ints, as_int
from seqpar.core.options import DTYPES, dtype_name, read_lengths
from seqpar.costs.cluster import Cluster
from seqpar.layout.layout import Layout
from seqpar.simulate.candidates import STRATEGIES, Candidate
from seqpar.simulate.playback.outcome import Outcome
from seqpar.simulate.playback.playing import play
from seqpar.simulate.recording.program import Compute, Post, Program

MESHES = ("mesh", "usp")  # the strategies on a 2-D mesh
CHOICES = {
    "strategy": STRATEGIES,
    "layout": ("zigzag", "contiguous", "striped"),
    "causal": ("yes", "no"),
    "dtype": tuple(DTYPES),
}
MAX_TOKENS, MAX_DOCUMENTS, MAX_RANKS = 2**22, 1024, 64
MAX_PARTS = 2**12  # limit on ranks² × documents, so that an answer takes only seconds
SAME = "same"  # the cluster with one H100 for each rank


@dataclass(frozen=True)
class Question:
    """A call of attention on ranks. A wrong field raises a ValueError that names it."""

    lengths: str = "20000,8192,4096,480"  # tokens per document, to be read by `read_lengths`
    ranks: int = 4  # the number of ranks
    strategy: str = "ring"  # a strategy of softmax attention
    layout: str = "zigzag"  # how documents are cut: "zigzag", "contiguous" or "striped"
    mesh: int = 2  # ranks per row, for "mesh" and "usp"
    heads: int = 32  # of q
    kv_heads: int = 8  # of k and v
    head_dim: int = 128  # of q, k and v
    window: int = -1  # the number of earlier keys to which a query attends; −1 means all
    causal: str = "yes"  # "yes" or "no"
    dtype: str = "bf16"  # of q, k and v
    cluster: str = SAME  # a preset such as "4x8-h100", or "same" for one H100 per rank, 8 per node

    def __post_init__(self) -> None:
        for name, least, most in (
            ("ranks", 1, MAX_RANKS), ("mesh", 1, MAX_RANKS), ("heads", 1, 1024),
            ("kv_heads", 1, 1024), ("head_dim", 1, 1024), ("window", -1, MAX_TOKENS),
        ):  # fmt: skip
            object.__setattr__(self, name, as_int(name, getattr(self, name), least, most))
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        for name, known in CHOICES.items():
            if (got := getattr(self, name)) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {got!r}")
        if (parts := self.ranks**2 * len(self.documents())) > MAX_PARTS:
            expected = f"must keep ranks² × documents at most {MAX_PARTS:,}"
            raise ValueError(f"ranks and lengths {expected}, got {parts:,}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads, {self.kv_heads}, got {self.heads}"
            )
        if self.strategy in MESHES and self.ranks % self.mesh:
            raise ValueError(f"mesh must divide {self.ranks} ranks, got {self.mesh}")
        if self.on().nodes * self.on().devices_per_node < self.ranks:
            raise ValueError(f"cluster must have at least {self.ranks} devices, got {self.cluster}")
        if self.on().nodes > MAX_RANKS:
            raise ValueError(f"cluster must have at most {MAX_RANKS} nodes, got {self.cluster}")

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> Question:
        values: dict[str, Any] = {}
        kinds = {field.name: int if field.type == "int" else str for field in fields(cls)}
        for name, text in texts.items():
            if name not in kinds:
                raise ValueError(f"fields must be among {', '.join(kinds)}, got {name}")
            try:
                values[name] = kinds[name](text.strip())
            except ValueError:
                raise ValueError(f"{name} must be a number, got {text!r}") from None
        return cls(**values)

    def documents(self) -> list[int]:
        lengths = read_lengths("lengths", self.lengths, MAX_DOCUMENTS)
        if not 0 < sum(lengths) <= MAX_TOKENS:
            raise ValueError(
                f"lengths must sum to 1 to {MAX_TOKENS:,} tokens, got {sum(lengths):,}"
            )
        return lengths

    def on(self) -> Cluster:
        name = self.cluster
        if name == SAME:
            name = f"1x{self.ranks}-h100" if self.ranks <= 8 else f"{-(-self.ranks // 8)}x8-h100"
        try:
            return Cluster.preset(name)
        except ValueError as error:
            raise ValueError(f"cluster: {error}") from None

    def candidate(self) -> Candidate:
        shape = (self.ranks // self.mesh, self.mesh) if self.strategy in MESHES else None
        return Candidate(self.strategy, shape)

    def address(self) -> str:
        values = asdict(self).items()
        return urlencode({name: x for name, x in values if x != getattr(Question, name)})


@dataclass(frozen=True)
class Answer:
    question: Question  # the question
    layout: Layout  # which rank holds which tokens
    work: Ints  # (ranks, steps) number of (query, key) pairs · heads in forward
    bytes: Ints  # (ranks, ranks) bytes from each rank to each rank, forward and backward
    outcome: Outcome  # when each rank computes, sends and waits, forward and backward


def answer(question: Question, check: Callable[[], None] = lambda: None) -> Answer:
    """Simulate the call of a question. No numbers are computed and no data is sent.

    `check` is called several times during the simulation. It can raise an error to stop the
    simulation. Raises a ValueError if the strategy cannot compute the call.
    """
    cluster, is_causal = question.on(), question.causal == "yes"
    cu_seqlens = np.cumsum([0, *question.documents()])
    layout: Layout = getattr(Layout, question.layout)(cu_seqlens, question.ranks)
    sizes = 1, question.heads, question.kv_heads, question.head_dim, question.head_dim
    shape = OperandShape(DTYPES[question.dtype], *sizes)
    options = {"causal": is_causal, "window_size": (question.window, 0 if is_causal else -1)}
    call = SimulatedCall(shape, layout, options)
    programs = call.record(question.candidate(), ordered=cluster.overlaps, check=check)
    check()
    return Answer(question, layout, work_of(programs), sent(programs), play(programs, cluster))


def sent(programs: list[Program]) -> Ints:
    """Return (ranks, ranks): the bytes that each rank sends to each other rank."""
    traffic = np.zeros((len(programs), len(programs)), dtype=np.int64)
    for rank, program in enumerate(programs):
        for action in program.each():
            for peer, nbytes in action.sends if isinstance(action, Post) else ():
                traffic[rank, peer] += nbytes
    return traffic


def work_of(programs: list[Program]) -> Ints:
    """Return (ranks, steps): the number of (query, key) pairs of each computation of each rank in
    the forward pass.
    """
    rows = [
        [x.area for x in program.each() if isinstance(x, Compute) and x.what.endswith("forward")]
        for program in programs
    ]
    steps = max(map(len, rows))
    return np.array([row + [0] * (steps - len(row)) for row in rows], dtype=np.int64)

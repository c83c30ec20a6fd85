"""Random settings of attention, and the steps that ranks run."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness import sleeping
from benchmarks.steps import Step
from seqpar.attention.operands import OperandShape
from seqpar.auto.choosing import Choice
from seqpar.auto.measuring import measured
from seqpar.comm.messages.comm import Comm
from seqpar.layout.layout import Layout
from seqpar.simulate.candidates import Candidate
from seqpar.softmax.module import Attention

RATES = (400, 800, 1600)  # Mbit/s of a rank's emulated link to a switch
ROW_BYTES = 2**21  # the most bytes of a rank's queries
PAIRS = 2**23  # the most pairs of the mask on a rank, times heads and dim / 64
SECONDS, MOST_ROUNDS = 4.0, 40  # limits of all rounds, beyond the requested number
RATIOS = 0.1, 4.0  # a forward's compute on links, over the time to send keys and values


class Setting(NamedTuple):
    """A setting: attention in fp32, forward and backward.

    Attributes:
        seed: the seed of the draw.
        ranks: the number of ranks.
        rate_mbit: the rate of emulated links; 0: cores without links.
        layout: "zigzag" or "contiguous".
        lengths: of the documents.
        heads, kv_heads, dim: of queries, of keys and values.
        window: keys that a query attends to, or 0 for all earlier keys.
        pair_seconds: sleep per pair and head instead of computing; 0: compute.
    """

    seed: int
    ranks: int
    rate_mbit: int
    layout: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    window: int
    pair_seconds: float = 0.0

    def made(self) -> Layout:
        edges = np.r_[0, np.cumsum(self.lengths)]
        layout: Layout = getattr(Layout, self.layout)(edges, self.ranks)
        return layout

    @property
    def shape(self) -> OperandShape:
        return OperandShape(torch.float32, 1, self.heads, self.kv_heads, self.dim, self.dim)

    @property
    def call(self) -> dict[str, Any]:
        """The arguments of a call, without tensors and layout."""
        return {"causal": True, "window_size": (self.window - 1 if self.window else -1, -1)}

    @property
    def pairs(self) -> float:
        """The mean number of pairs of the mask per rank and head."""
        lengths = np.array(self.lengths, float)
        seen = np.minimum(lengths, self.window or np.inf)
        return float((lengths * seen - seen**2 / 2).sum() / self.ranks)

    def __str__(self) -> str:
        link = f"{self.rate_mbit} Mbit/s" if self.rate_mbit else "cores"
        heads = f"{self.heads}:{self.kv_heads} heads of {self.dim}"
        window = f", window {self.window}" if self.window else ""
        shape = f"{sum(self.lengths)} tokens in {len(self.lengths)}, {self.layout}"
        return f"{self.seed}: {self.ranks} ranks, {link}, {shape}, {heads}{window}"


def drawn(seed: int, smallest: int = 2048, largest: int = 16384, links: bool = True) -> Setting:
    """Draw a setting of 2 or 4 ranks, with tokens uniform in their logarithm.

    Half of the settings have one document, a quarter a window, and half are on links. Settings that
    would take too long are drawn again, from the same generator.
    """
    generator = np.random.default_rng(seed)
    while True:
        tokens = int(np.exp(generator.uniform(np.log(smallest), np.log(largest))))
        cuts = 0 if generator.random() < 0.5 else int(generator.integers(1, 8))
        edges = np.unique(np.r_[0, generator.integers(1, tokens, cuts), tokens])
        kv_heads = int(generator.choice([1, 2, 4]))
        found = Setting(
            seed=seed,
            ranks=int(generator.choice([2, 4])),
            rate_mbit=int(generator.choice(RATES)) if generator.random() < 0.5 and links else 0,
            layout=str(generator.choice(["zigzag", "contiguous"])),
            lengths=tuple(np.diff(edges).tolist()),
            heads=kv_heads * int(generator.choice([1, 2, 4])),
            kv_heads=kv_heads,
            dim=int(generator.choice([32, 64, 128])),
            window=int(generator.integers(32, 1024)) if generator.random() < 0.25 else 0,
        )
        row_bytes = tokens / found.ranks * found.heads * found.dim * 4
        if found.rate_mbit:
            ratio = np.exp(generator.uniform(*np.log(RATIOS)))
            sent = 2 * row_bytes * kv_heads / found.heads * 8 / (found.rate_mbit * 1e6)
            found = found._replace(pair_seconds=ratio * sent / (found.pairs * found.heads))
        if row_bytes <= ROW_BYTES and found.pairs * found.heads * found.dim / 64 <= PAIRS:
            return found


def step_of(setting: Setting) -> Step:
    """Return this rank's step of a setting, which any candidate's module can make."""
    sizes = setting.heads, setting.dim, setting.kv_heads
    return Step(setting.made(), *sizes, **setting.call)


def module(candidate: Candidate) -> Attention:
    return candidate.make(Comm.of(dist.group.WORLD))


def errors(setting: Setting, found: list[Candidate]) -> list[float]:
    """Return each candidate's largest relative RMS error on this rank."""
    step = step_of(setting)
    return [step.error(module(each)) for each in found]


def seconds(setting: Setting, found: list[Candidate], rounds: int) -> list[list[float]]:
    """Return this rank's seconds of each candidate, in interleaved rounds.

    There are at least `rounds` rounds, and more for short steps, whose times vary more. Each round
    has another order, since a step's time also depends on the previous step.
    """
    torch.set_num_threads(1)
    step, orders = step_of(setting), np.random.default_rng(setting.seed)

    def turns() -> list[float]:
        taken = [0.0] * len(found)
        for i in orders.permutation(len(found)).tolist():
            taken[i] = step.seconds(module(found[i]))
        return taken

    with sleeping(setting.pair_seconds):
        once = torch.tensor(sum(turns()))
        dist.broadcast(once, 0)  # the same number of rounds on all ranks
        count = max(rounds, min(MOST_ROUNDS, int(SECONDS / float(once))))
        times = [turns() for _ in range(count)]
    return [list(each) for each in zip(*times, strict=True)]


def tuned(setting: Setting, choice: Choice, error: float) -> Choice:
    """Return a choice measured like in `make_attention("auto", ...)`.

    Candidates with close predictions are measured.
    """
    torch.set_num_threads(1)
    step, comm = step_of(setting), Comm.of(dist.group.WORLD)
    operands, made = tuple(step.operands), functools.cache(module)
    with sleeping(setting.pair_seconds):
        return measured(choice, error, made, step.forward, operands, comm, True)

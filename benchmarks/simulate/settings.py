"""Random settings of attention, and the steps that ranks run."""

from __future__ import annotations

import functools
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness
from seqpar.attention.operands import OperandShape
from seqpar.auto.choosing import Choice
from seqpar.auto.measuring import measured
from seqpar.comm.messages.exchange import Comm
from seqpar.core.hooks import hooks
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
        """Return the layout."""
        edges = np.r_[0, np.cumsum(self.lengths)]
        layout: Layout = getattr(Layout, self.layout)(edges, self.ranks)
        return layout

    @property
    def shape(self) -> OperandShape:
        """The shape of the operands."""
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


class Step:
    """A rank's step of a setting, with any candidate."""

    def __init__(self, setting: Setting) -> None:
        self._setting, self._layout = setting, setting.made()
        self.rank, generator = dist.get_rank(), torch.Generator().manual_seed(setting.seed)
        tokens, dim = sum(setting.lengths), setting.dim
        heads = setting.heads, setting.kv_heads, setting.kv_heads, setting.heads
        whole = [torch.randn(tokens, h, dim, generator=generator) for h in heads]
        local = [self._layout.shard(x, self.rank).contiguous() for x in whole]
        self._whole, self._dout = whole, local.pop()
        self._operands = [x.requires_grad_() for x in local]

    def __call__(self, candidate: Candidate) -> list[Tensor]:
        """Return out and the gradients of q, k and v."""
        out = self._forward(candidate.make(Comm.of(dist.group.WORLD)))
        return [out, *torch.autograd.grad(out, self._operands, self._dout)]

    def _forward(self, attn: Attention) -> Tensor:
        out: Tensor = attn(*self._operands, self._layout, **self._setting.call)
        return out

    def measured(self, choice: Choice, error: float) -> Choice:
        """Return a choice measured like in `make_attention("auto", ...)`."""
        comm, operands = Comm.of(dist.group.WORLD), tuple(self._operands)
        module = functools.cache(lambda candidate: candidate.make(comm))
        return measured(choice, error, module, self._forward, operands, comm, True)

    def expected(self) -> list[Tensor]:
        """Return the expected results, from one process in fp64."""
        q, k, v, dout = (x.double().requires_grad_() for x in self._whole)
        parts = []
        split = (x.transpose(0, 1).split(self._setting.lengths, 1) for x in (q, k, v))
        for each in zip(*split, strict=True):
            position = torch.arange(each[0].shape[1])
            distance = position[:, None] - position
            seen = (distance >= 0) & (distance < (self._setting.window or distance.numel() + 1))
            parts.append(F.scaled_dot_product_attention(*each, attn_mask=seen, enable_gqa=True))
        out = torch.cat(parts, 1).transpose(0, 1)
        whole = [out, *torch.autograd.grad(out, [q, k, v], dout)]
        return [self._layout.shard(x, self.rank) for x in whole]


def errors(setting: Setting, found: list[Candidate]) -> list[float]:
    """Return each candidate's largest relative RMS error on this rank."""
    step = Step(setting)
    return [harness.worst_error(step(each), step.expected()) for each in found]


def seconds(setting: Setting, found: list[Candidate], rounds: int) -> list[list[float]]:
    """Return this rank's seconds of each candidate, in interleaved rounds.

    There are at least `rounds` rounds, and more for short steps, whose times vary more. Each round
    has another order, since a step's time also depends on the previous step.
    """
    torch.set_num_threads(1)
    step, orders = Step(setting), np.random.default_rng(setting.seed)

    def turns() -> list[float]:
        taken = [0.0] * len(found)
        for i in orders.permutation(len(found)).tolist():
            dist.barrier()
            start = time.perf_counter()
            step(found[i])
            taken[i] = time.perf_counter() - start
        return taken

    with computes(setting):
        once = torch.tensor(sum(turns()))
        dist.broadcast(once, 0)  # the same number of rounds on all ranks
        count = max(rounds, min(MOST_ROUNDS, int(SECONDS / float(once))))
        times = [turns() for _ in range(count)]
    return [list(each) for each in zip(*times, strict=True)]


def tuned(setting: Setting, choice: Choice, error: float) -> Choice:
    """Return a choice after candidates with close predictions were measured."""
    torch.set_num_threads(1)
    with computes(setting):
        return Step(setting).measured(choice, error)


def computes(setting: Setting) -> AbstractContextManager[None]:
    """Return a context that replaces computes by sleeps, if the setting has sleeps."""
    if not setting.pair_seconds:
        return nullcontext()
    return hooks.set(replace_compute=lambda area: time.sleep(area * setting.pair_seconds))

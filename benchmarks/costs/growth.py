"""Compute how each strategy's cost grows, from 8 to 16,384 ranks.

The code of one or two ranks is recorded on tensors without data, so no run needs all ranks. Bytes,
messages and memory are the recorded ones. Seconds are those of a layer's attention, forward and
backward, on nodes of 8 H100 if all ranks keep step (`seconds_in_step`). Only the host's time to
list a new layout's messages is measured: CPU time, one sample. The recorded bytes are compared with
`traffic`, which computes them another way.
"""

from __future__ import annotations

import multiprocessing
import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch

from benchmarks import harness
from seqpar import Layout
from seqpar.attention.backend import use_backend
from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.grid import span_tasks
from seqpar.costs.model import Model
from seqpar.simulate import Comm, Program, play, record
from seqpar.simulate.playback.one_rank import seconds_in_step
from seqpar.simulate.recording.program import Post
from seqpar.simulate.steps.recorded_layers import Attending
from seqpar.strategies.zeco import ZeCO

RANKS = 8, 32, 128, 512, 2048, 4096, 16384
TOKENS_PER_RANK = 4096  # in weak scaling
TOKENS = 2**24  # in strong scaling
SOFTMAX = "ulysses", "ring", "all_gather", "token_ring", "mesh", "usp", "disaggregated"
TRANSPORTS = {"lasp2": "all_gather", "zeco": "scan", "recurrent": "tree"}
MODELS = {"dense": "llama-8b", "window": "mistral-7b", "linear": "minimax-text-01"}
NODE = 8
PLAYED_RANKS = 32  # all ranks are also simulated together, to know the error of one rank's time


class Case(NamedTuple):
    """A strategy's call: "dense", "window" or "linear" attention on a number of ranks."""

    strategy: str
    kind: str
    ranks: int
    tokens: int

    @property
    def costs(self) -> Costs:
        recurrent = self.strategy == "recurrent"
        model = Model.preset("qwen3-next-80b" if recurrent else MODELS[self.kind])
        return Costs(Cluster.preset(f"{self.ranks // NODE}x{NODE}-h100"), model)

    @property
    def attending(self) -> Attending:
        model, kind = self.costs.model, "softmax" if self.kind == "dense" else self.kind
        layer = next(x for x in model.layers if x.kind == kind)
        return Attending(model, layer, torch.bfloat16, TRANSPORTS.get(self.strategy, "all_gather"))

    @property
    def mesh(self) -> tuple[int, ...]:
        """The shape of the group: near a square for Mesh, rows of a node for USP."""
        if self.strategy == "usp":
            return self.ranks // NODE, NODE
        if self.strategy == "mesh":
            row = 2 ** ((self.ranks.bit_length() - 1) // 2)
            return self.ranks // row, row
        return (self.ranks,)

    @property
    def observed(self) -> tuple[int, ...]:
        """The ranks that are recorded.

        Ranks of a zigzag document are alike, except at its ends. The last rank has a head if
        Ulysses has more ranks than heads. Rank 0 sends most states of linear layers.
        """
        if self.strategy == "ulysses":
            return (self.ranks - 1,)
        middle = self.ranks // 3
        return (0, middle) if self.kind == "linear" else (middle,)

    def layout(self) -> Layout:
        """Return one document: contiguous for linear layers, otherwise zigzag."""
        cut = Layout.contiguous if self.kind == "linear" else Layout.zigzag
        return cut(self.tokens, self.ranks)


def cases(ranks: tuple[int, ...] = RANKS) -> list[Case]:
    kinds = [(x, kind) for x in SOFTMAX for kind in ("dense", "window")]
    kinds += [(x, "linear") for x in TRANSPORTS]
    found = [
        Case(*kind, n, tokens)
        for kind in kinds
        for n in ranks
        for tokens in (n * TOKENS_PER_RANK, TOKENS)
    ]
    return list(dict.fromkeys(found))


def ideal_seconds(case: Case) -> float:
    """Return the time of the layer's attention if ranks share its work evenly, without messages."""
    costs, window = case.costs, case.attending.layer.window
    if case.kind == "linear":
        each = (costs.recurrent_call(case.tokens / case.ranks, back) for back in (False, True))
        return float(sum(each))
    tasks = span_tasks(0, case.tokens, window)
    return (
        float(sum(costs.attention_call(tasks, backward=x)[0] for x in (False, True))) / case.ranks
    )


def traffic_of(case: Case, layout: Layout, rank: int) -> list[Any]:
    """Return a rank's messages by the strategy's own arithmetic."""
    attending, tokens = case.attending, layout.tokens_on(rank)
    comm = Comm("growth", rank, case.ranks)
    comm.shape = case.mesh
    module = attending.module(comm, case.strategy)
    return module.traffic(*attending.operands(tokens), layout, **attending.call(tokens))


def programs_of(case: Case, layout: Layout, only: tuple[int, ...] | None) -> list[Program]:
    """Return the programs of some ranks, or of all, of a layer's attention."""
    attending = case.attending

    def code(comm: Comm) -> None:
        tokens = layout.tokens_on(comm.rank)
        module = attending.module(comm, case.strategy)
        out = module(*attending.operands(tokens), layout, **attending.call(tokens))
        out.backward(torch.empty_like(out))

    with use_backend("aten"):
        return record(code, case.ranks, mesh=case.mesh, only=only)


def chain_seconds(case: Case) -> float:
    """Return the time in which ZeCO's blocks pass all ranks, forward and back; 0 for others.

    A rank of ZeCO waits for all ranks before it, which `seconds_in_step` does not count.
    """
    if case.strategy != "zeco":
        return 0.0
    costs, nodes = case.costs, case.ranks // NODE
    block = costs.state_bytes() / ZeCO().blocks
    hops = {"inside": case.ranks - 1 - nodes, "between": nodes - 1}
    return 2 * sum(n * float(costs.message(block, link)) for link, n in hops.items() if n)


def row_of(case: Case) -> dict[str, Any]:
    """Return a row of the results: the most of any observed rank."""
    layout, host, listed = case.layout(), [], []
    for rank in case.observed:
        start = time.process_time()
        listed.append(sum(x.bytes for x in traffic_of(case, layout, rank)))
        host.append(time.process_time() - start)
    programs = programs_of(case, layout, case.observed)
    if listed != [x.sent_bytes for x in programs]:
        raise SystemExit(f"{case}: traffic lists {listed} bytes, not those recorded")
    posts = [[x for x in program.each() if isinstance(x, Post)] for program in programs]
    cluster = case.costs.cluster
    seconds = [
        seconds_in_step(program, rank, cluster)
        for rank, program in zip(case.observed, programs, strict=True)
    ]
    played = None
    if case.ranks == PLAYED_RANKS and case.tokens < TOKENS:
        played = play(programs_of(case, layout, None), cluster).seconds
    return {
        **case._asdict(),
        "bytes": max(listed),
        "messages": max(sum(len(x.sends) for x in post) for post in posts),
        "peak_bytes": max(x.peak_bytes for x in programs),
        "host_seconds": host[0],  # the first one is of a new layout
        "seconds": max(seconds) + chain_seconds(case),
        "ideal_seconds": ideal_seconds(case),
        "played_seconds": played,
    }


def measure(_: Namespace) -> dict[str, Any]:
    """Compute all cases; `growth_page` draws them."""
    rows = []
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(harness.CORES, spawned) as pool:
        for row in pool.map(row_of, cases()):
            rows.append(row)
            print(*(f"{name}={value}" for name, value in row.items()), flush=True)
    return {"models": MODELS, "rows": rows}


if __name__ == "__main__":
    harness.run("growth", __doc__, {}, measure, canary_is="none")

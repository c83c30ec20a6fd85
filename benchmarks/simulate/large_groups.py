"""Measure how long the simulation of a step takes on large groups of ranks, and its error.

One layer of llama-8b, causal attention to one document of 1,024 tokens per rank in zigzag, on nodes
of 8 H100. 32 ranks are played in place of all, 16 of more than 4,096, and also 32 of 128, where the
library would play all. `error` compares the step with one in which all ranks are played. `cpu` is
the CPU time of simulating the step, and `memory` its peak, in a new process per case.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import resource
import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from benchmarks import harness
from seqpar import Layout, simulate
from seqpar.balance import Cluster, Model
from seqpar.simulate.playback import stand_ins
from seqpar.simulate.steps.recorded_layers import record_attention_once

MODEL, TOKENS_PER_RANK, NODE = "llama-8b", 1024, 8
EVERY_RANK = 2**20
# (strategy, ranks, mesh, whether all ranks are played too)
CASES: list[tuple[str, int, tuple[int, int] | None, bool]] = [
    ("ring", 128, None, True),
    ("all_gather", 128, None, True),
    ("usp", 128, (16, 8), True),
    ("mesh", 128, (16, 8), True),
    ("ring", 256, None, True),
    ("ring", 1024, None, False),
    ("all_gather", 1024, None, False),
    ("usp", 1024, (128, 8), False),
    ("mesh", 1024, (32, 32), False),
    ("usp", 16384, (2048, 8), False),
    ("ring", 16384, None, False),
]


def row_of(strategy: str, ranks: int, mesh: tuple[int, int] | None, compares: bool) -> Any:
    torch.set_num_threads(1)
    model = Model.preset(MODEL)
    model = dataclasses.replace(model, layers=model.layers[:1])
    layout = Layout.zigzag([0, ranks * TOKENS_PER_RANK], ranks)
    cluster = Cluster.preset(f"{ranks // NODE}x{NODE}-h100")

    def seconds(most_played: int) -> tuple[float, float]:
        stand_ins.MAX_RANKS_PLAYED_WHOLE = most_played
        record_attention_once.cache_clear()
        start = time.process_time()
        step = simulate.step(strategy, layout, cluster, model, mesh=mesh)
        return step.seconds, time.process_time() - start

    predicted, cpu = seconds(0)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    row = {"strategy": strategy, "ranks": ranks, "mesh": mesh, "cpu": cpu, "memory": memory}
    row |= {"predicted": predicted}
    if compares:
        exact, whole_cpu = seconds(EVERY_RANK)
        row |= {"whole_cpu": whole_cpu, "error": predicted / exact - 1}
    return row


def measure(_: Namespace) -> dict[str, Any]:
    spawned, rows = multiprocessing.get_context("spawn"), []
    for case in CASES:
        with ProcessPoolExecutor(1, spawned) as pool:  # a new process, with empty caches
            rows.append(row := pool.submit(row_of, *case).result())
        print(*(f"{name}={value}" for name, value in row.items()), flush=True)
    return {"model": MODEL, "rows": rows}


if __name__ == "__main__":
    harness.run("large-groups", __doc__, {}, measure, canary_is="none")

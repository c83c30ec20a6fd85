"""Measure the host's time for the plans and tables of a layout's first call, forward and backward.

Packed training has a new layout in every step. One rank of 8 calls attention over a million tokens
in 32 documents: zigzag, causal, 32 query heads and 8 KV heads of 128, bf16. The backend is
"triton", for the gated delta rule "fla".
"in the step" is the time in which the first call builds its plans and tables. If the layout was
prepared, "loader" is the time in which a thread of the DataLoader unpickles it and pins its tables,
and "remaining" is what the first call still does. Times are CPU time, because other programs share
the machine's cores. Nothing is computed or sent. The meta device stands in for a GPU, so copies to
it take no time, and a copy to ordinary memory stands in for pinning. LASP-2's spans are not cut
into segments, of which a GPU gets about two for each multiprocessor.
"""

from __future__ import annotations

import gc
import pickle
import statistics
import time
from argparse import Namespace
from functools import partial
from itertools import pairwise
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import triton

from benchmarks import harness
from seqpar import LASP2Attention, Layout, RecurrentAttention, make_attention, use_backend
from seqpar.attention.rehearsal import SilentComm, upload_tables
from seqpar.linear.inputs import Inputs

STRATEGIES = "ring", "all_gather", "token_ring", "ulysses"
LINEAR = "lasp2", "gated_delta"
RANKS, RANK, TOKENS, DOCUMENTS = 8, 3, 2**20, 32
HEADS, KV_HEADS, DIM = 32, 8, 128
COLUMNS = "in the step", "loader", "remaining"
META = torch.device("meta")


def layout_of(seed: int) -> Layout:
    lengths = np.random.default_rng(seed).multinomial(TOKENS, np.full(DOCUMENTS, 1 / DOCUMENTS))
    return Layout.zigzag(np.r_[0, np.cumsum(lengths)], RANKS)


def begin(attn: Any, layout: Layout) -> None:
    """Do everything that a layout's first call does before it computes."""
    tokens = layout.tokens_on(RANK)
    q, k, v = (
        torch.empty(tokens, n, DIM, dtype=torch.bfloat16, device=META)
        for n in (HEADS, KV_HEADS, KV_HEADS)
    )
    strategy, comm = attn._bound.strategy, attn._bound.comm
    if not isinstance(attn, LASP2Attention | RecurrentAttention):
        call = attn._resolve(q, k, v, layout, causal=True)
        upload_tables(strategy, comm, call, META, True)
        return
    inputs = Inputs(q[None], k[None], v[None])
    arguments = attn._operator_inputs(q, k, v, layout)[1]
    linear_call = strategy.to_call(comm, arguments, inputs, False)
    upload_tables(strategy, comm, linear_call, META, True)


def row_of(strategy: str, rounds: int) -> dict[str, Any]:
    """Return a row of the results; each sample has a new layout, whose tables no cache has."""
    comm = SilentComm(RANK, RANKS, False)
    made = {"lasp2": LASP2Attention, "gated_delta": partial(RecurrentAttention, kind=strategy)}
    attn: Any = made[strategy](comm) if strategy in made else make_attention(strategy, comm)
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM}
    prepare = attn.preparation(**sizes, dtype=torch.bfloat16, device=META, causal=True)
    samples: dict[str, list[float]] = {name: [] for name in COLUMNS}
    for seed in range(rounds + 1):  # the first round imports modules
        pickled = ForkingPickler.dumps(prepare(layout_of(2 * seed)))  # as workers do
        new = layout_of(2 * seed + 1)
        gc.collect()  # of earlier rounds, and the layout that was prepared
        moments = [time.process_time()]
        begin(attn, new)
        moments.append(time.process_time())
        layout = pickle.loads(pickled).pin_memory()
        moments.append(time.process_time())
        begin(attn, layout)
        moments.append(time.process_time())
        for name, (start, stop) in zip(COLUMNS, pairwise(moments if seed else []), strict=False):
            samples[name].append(1e3 * (stop - start))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return {"strategy": strategy, "medians": medians, "samples": samples}


def measure(options: Namespace) -> dict[str, Any]:
    triton.knobs.runtime.interpret = True  # the backend takes tensors that are not on a GPU
    torch.set_num_threads(1)
    torch.Tensor.pin_memory = torch.Tensor.clone  # type: ignore[assignment,method-assign]
    torch.multiprocessing.set_sharing_strategy("file_system")  # the other one needs two processes
    rows = []
    for strategy in (*STRATEGIES, *LINEAR):
        with use_backend("fla" if strategy == "gated_delta" else "triton"):
            rows.append(row_of(strategy, options.rounds))
    cells = [[row["strategy"], *(f"{x:.1f}" for x in row["medians"].values())] for row in rows]
    print(harness.table(["strategy", *(f"{x}, ms" for x in COLUMNS)], cells))
    return {"rounds": options.rounds, "rows": rows}


if __name__ == "__main__":
    harness.run("overhead-tables", __doc__, {"--rounds": 7}, measure, canary_is="none")

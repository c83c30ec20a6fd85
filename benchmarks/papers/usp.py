"""USP: the share of two A800 nodes' peak that Llama 3 8B reaches on 208K tokens."""

from __future__ import annotations

import numpy as np

from benchmarks.papers import megatron
from benchmarks.papers.virtual_time import flops, least_checkpointing
from seqpar import Layout
from seqpar.balance import Cluster, Model

TOKENS = 208 * 1024
MODEL = Model.preset("llama-8b")


def predict(mini: bool) -> dict[str, float]:
    """Return the MFU of the paper's mesh and of others, counted in two ways."""
    size, tokens = (2, TOKENS // 4) if mini else (8, TOKENS)
    cluster = Cluster.preset(f"2x{size}-a800")
    layout, lengths = Layout.zigzag(tokens, cluster.ranks), np.array([tokens])
    peak = cluster.ranks * cluster.device.matmul_rate

    def mfu(seconds: float, causal: bool = True) -> float:
        return 100 * flops(MODEL, lengths, causal=causal) / seconds / peak

    _, seconds = least_checkpointing("usp", layout, cluster, MODEL, mesh=(2, size))
    found = {"MFU, of the pairs that attend": mfu(seconds)}
    found["MFU, of all pairs"] = mfu(seconds, causal=False)
    for name, strategy, mesh in (
        ("a ring over 8 ranks, heads over 2", "usp", {"mesh": (size, 2)}),
        ("Ulysses", "ulysses", {}),
        ("Ring", "ring", {}),
    ):
        if not mini:
            _, other = least_checkpointing(strategy, layout, cluster, MODEL, **mesh)
            found[f"MFU, of the pairs that attend: {name}"] = mfu(other)
    tensor = megatron.step(lengths, cluster.ranks, cluster, MODEL)
    return found | {"MFU, of the pairs that attend: Megatron-LM on all GPUs": mfu(tensor)}

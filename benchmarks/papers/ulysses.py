"""DeepSpeed-Ulysses: its throughput over Megatron-LM's, and a volume that does not grow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.papers import megatron
from benchmarks.papers.virtual_time import Shape, attention, flops, sharded
from seqpar import Layout
from seqpar.balance import Cluster, Costs, Model
from seqpar.costs.model import Layer

K = 1024
_A100 = Cluster.preset("8x8-a100")
CLUSTER = replace(_A100, device=replace(_A100.device, memory=40e9))  # the paper, section 4


def gpt(layers: int, hidden: int, heads: int) -> Model:
    """Return a GPT with feed-forward parts four times as wide as the model."""
    layer = Layer("softmax", None, 4 * hidden, 4 * hidden)
    sizes = hidden, heads, heads, hidden // heads, 50304
    return Model("gpt", (layer,) * layers, *sizes, gated=False, tied=True)


GPT_30B, GPT_7B = gpt(64, 6144, 64), gpt(32, 4096, 32)
LENGTHS = 8, 16, 32, 64, 128, 256  # Ki tokens of the 30B model
MEGATRON_LENGTHS = LENGTHS[:4]  # after which Megatron-LM runs out of memory; all of the 7B model


def rate(model: Model, lengths: np.ndarray, seconds: float, ranks: int) -> float:
    """Return TFLOP/s per GPU, including the recomputed forward."""
    return flops(model, lengths, forwards=2) / seconds / ranks / 1e12


def ulysses(model: Model, tokens: int, gpus: int) -> float:
    """Return Ulysses' TFLOP/s, on the fewest ranks per sequence that hold it."""
    ranks = 1
    while ranks <= gpus:
        layout = Layout.contiguous(tokens, ranks)
        seconds, held = sharded("ulysses", layout, CLUSTER, model, "full", gpus)
        if held <= CLUSTER.device.memory:
            return rate(model, np.array([tokens]), seconds, ranks)
        ranks *= 2
    raise ValueError(f"tokens: {tokens} do not fit")


def tensor_parallel(model: Model, tokens: int, ranks: int) -> float:
    """Return Megatron-LM's TFLOP/s."""
    lengths = np.array([tokens])
    return rate(model, lengths, megatron.step(lengths, ranks, CLUSTER, model), ranks)


def longest(model: Model, ranks: int) -> tuple[int, int]:
    """Return the most tokens, 2ⁿ, of Ulysses and Megatron-LM with full checkpointing."""
    costs, memory = Costs(CLUSTER, model), CLUSTER.device.memory
    found = []
    for held in (
        lambda tokens: (
            float(costs.activation_bytes(tokens / ranks, "full")) + costs.parameter_bytes(ranks)
        ),
        lambda tokens: megatron.held_bytes(costs, tokens, ranks),
    ):
        tokens = K
        while held(2 * tokens) <= memory:
            tokens *= 2
        found.append(tokens)
    return found[0], found[1]


def volume(ranks: int) -> float:
    """Return the elements that a rank sends in a forward, over hN/P, with N/P constant."""
    each, shape = 4096, Shape(64, 64, 96)
    layout = Layout.contiguous(each * ranks, ranks)
    sent = attention("ulysses", layout, CLUSTER, shape, False).sent_bytes.max()
    return float(sent / (2 * each * shape.heads * shape.head_dim))


def predict(mini: bool) -> dict[str, float]:
    """Return volumes, and both systems' throughput."""
    lengths, both = (LENGTHS[:1], LENGTHS[:1]) if mini else (LENGTHS, MEGATRON_LENGTHS)
    degrees, wide = ((2, 4), 8) if mini else ((8, 16, 32, 64), 64)
    found = {f"volume per GPU on {n} GPUs, over Nh/P": volume(n) for n in degrees}
    ours = {k: ulysses(GPT_30B, k * K, 64) for k in lengths}
    theirs = {k: tensor_parallel(GPT_30B, k * K, wide) for k in both}
    found |= {f"30B, {k}K: Ulysses": rate for k, rate in ours.items()}
    found |= {f"30B, {k}K: Megatron-LM on {wide} GPUs": rate for k, rate in theirs.items()}
    found["30B: Ulysses over Megatron-LM, largest speedup"] = max(ours[k] / theirs[k] for k in both)
    of = "30B: largest speedup over Megatron-LM inside nodes with a sharded optimizer"
    found[of] = max(ours[k] / tensor_parallel(GPT_30B, k * K, 8) for k in both)
    most = longest(GPT_30B, 64)
    found["30B: longest sequence, over Megatron-LM's"] = most[0] / most[1]
    for k in both:
        ratio = ulysses(GPT_7B, k * K, 32) / tensor_parallel(GPT_7B, k * K, 8)
        found[f"7B, {k}K: Ulysses over Megatron-LM on 8 GPUs"] = ratio
    return found

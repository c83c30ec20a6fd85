"""DeepSpeed-Ulysses: its throughput over Megatron-LM's, and a volume that does not grow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.papers import megatron
from benchmarks.papers.attention import Shape, attention
from benchmarks.papers.frame import Paper, Point
from benchmarks.papers.training import flops, sharded
from seqpar import Layout
from seqpar.balance import Cluster, Costs, Model
from seqpar.costs.model import Layer

K = 1024
_A100 = Cluster.preset("8x8-a100")
CLUSTER = replace(_A100, device=replace(_A100.device, memory=40e9))  # the paper, section 4
SOURCE = "DeepSpeed's blog"


def gpt(layers: int, hidden: int, heads: int) -> Model:
    """Return a GPT with feed-forward parts four times as wide as the model."""
    layer = Layer("softmax", None, 4 * hidden, 4 * hidden)
    sizes = hidden, heads, heads, hidden // heads, 50304
    return Model("gpt", (layer,) * layers, *sizes, gated=False, tied=True)


GPT_30B, GPT_7B = gpt(64, 6144, 64), gpt(32, 4096, 32)
# TFLOP/s per GPU by K tokens, read off the bars; Megatron-LM runs out of memory after its last.
BARS = {
    "30B": (
        {8: 165.5, 16: 157, 32: 152, 64: 147, 128: 139.5, 256: 134},
        {8: 45, 16: 67.5, 32: 85.5, 64: 104.5},
    ),
    "7B": ({8: 159, 16: 175.5, 32: 177.5, 64: 181}, {8: 106, 16: 143, 32: 164.5, 64: 165}),
}


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


def volumes(degrees: tuple[int, ...]) -> list[Point]:
    """Return the elements that a rank sends in a forward, over hN/P, with N/P constant."""
    points, each, shape = [], 4096, Shape(64, 64, 96)
    for ranks in degrees:
        layout = Layout.contiguous(each * ranks, ranks)
        sent = attention("ulysses", layout, CLUSTER, shape, False).sent_bytes.max()
        share = sent / (2 * each * shape.heads * shape.head_dim)
        points.append(Point(f"volume a link on {ranks} GPUs, over Nh/P", "elements", share, 4,
                            f"{SOURCE}, volume analysis"))  # fmt: skip
    return points


def paper(mini: bool = False) -> Paper:
    """Return volumes, and both systems' throughput."""
    lengths = (8,) if mini else (8, 16, 32, 64, 128, 256)
    points = volumes((2, 4) if mini else (8, 16, 32, 64))
    found: dict[tuple[str, int], float] = {}
    figure = f"{SOURCE}, dense30B.png"
    wide = 8 if mini else 64
    for k in lengths:
        found["ulysses", k] = ulysses(GPT_30B, k * K, 64)
        points.append(Point(f"30B, {k}K: Ulysses", "TFLOP/s", found["ulysses", k],
                            BARS["30B"][0][k], figure))  # fmt: skip
    for k in [k for k in lengths if k in BARS["30B"][1]]:
        found["megatron", k] = tensor_parallel(GPT_30B, k * K, wide)
        points.append(Point(f"30B, {k}K: Megatron-LM on {wide} GPUs", "TFLOP/s",
                            found["megatron", k], BARS["30B"][1][k], figure))  # fmt: skip
    both = [k for system, k in found if system == "megatron"]
    most = longest(GPT_30B, 64)
    ratios = [found["ulysses", k] / found["megatron", k] for k in both]
    points.append(Point("30B: Ulysses over Megatron-LM, the most", "×", max(ratios), 2.5,
                        "abstract"))  # fmt: skip
    points.append(Point("30B: the same, over Megatron-LM inside nodes, its optimizer sharded", "×",
                        max(found["ulysses", k] / tensor_parallel(GPT_30B, k * K, 8)
                            for k in both)))  # fmt: skip
    points.append(Point("30B: longest sequence, over Megatron-LM's", "×", most[0] / most[1], 4,
                        "abstract"))  # fmt: skip
    for k in [k for k in lengths if k in BARS["7B"][0]]:
        ours = ulysses(GPT_7B, k * K, 32) / tensor_parallel(GPT_7B, k * K, 8)
        ratio = BARS["7B"][0][k] / BARS["7B"][1][k]
        points.append(Point(f"7B, {k}K: Ulysses over Megatron-LM on 8 GPUs", "×", ours,
                            round(ratio, 2), f"{SOURCE}, dense7B.png"))  # fmt: skip
    return Paper("ulysses", "[DeepSpeed-Ulysses](https://arxiv.org/abs/2309.14509)", tuple(points))

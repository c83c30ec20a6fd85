"""The memory of ranks while backward goes through the layers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.block import Block
from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.model import Layer, Model
from seqpar.memory import profile
from seqpar.simulate.steps.step_memory import StepMemory

HEADS, DIM, FFN, VOCABULARY, LAYERS = 2, 64, 352, 512, 4
WIDTH = HEADS * DIM
LAYER = Layer("softmax", None, FFN, FFN)
MODEL = Model("decoder", (LAYER,) * LAYERS, WIDTH, HEADS, HEADS, DIM, VOCABULARY)
H100 = Cluster.preset("1x4-h100")
COSTS = Costs(replace(H100, device=replace(H100.device, dtype="float32")), MODEL)


class Attention(torch.autograd.Function):
    """Attention that keeps its operands and results, without computing anything."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = q.new_empty(q.shape)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:2]))
        return out

    @staticmethod
    def backward(ctx, gradient):
        return tuple(x.new_empty(x.shape) for x in ctx.saved_tensors[:3])


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(HEADS, HEADS, DIM, FFN) for _ in range(LAYERS))
        for layer in self.layers:
            layer.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, Attention.apply)
        return self.head(x[:1]).sum() + x.sum()  # without the logits of all tokens


def on_one_rank(costs, tokens, temporary=0.0, checkpointing="none", ranks=1, **options):
    held = StepMemory.over_layers(costs, checkpointing, ranks, **options)
    return held.on(np.array([float(tokens)]), np.array([float(temporary)]))


@pytest.mark.parametrize("tokens", [40, 400, 4000])
def test_the_peak_is_that_of_a_profiled_step(tokens):
    """With few tokens, most of the memory is gradients at the end; with many, activations."""
    found = profile(Decoder(), {"ids": torch.zeros(tokens, dtype=torch.long)})
    of_attention = 4 * tokens * WIDTH * 4  # gradients of out, q, k and v
    (counted,) = on_one_rank(COSTS, tokens, of_attention).peak()
    counted -= COSTS.optimizer_itemsize * MODEL.parameters
    assert found.peak_bytes <= counted <= 1.05 * found.peak_bytes


def test_gradients_replace_activations():
    few, many = (on_one_rank(COSTS, x) for x in (1, 10**6))
    states = COSTS.parameter_bytes(1) - 4 * MODEL.parameters
    assert few.peak() == pytest.approx(COSTS.parameter_bytes(1), rel=0.01)
    of_last_layer = 4 * (MODEL.layer_parameters(LAYER) + VOCABULARY * WIDTH)
    kept, gradients = LAYERS * COSTS.layer_bytes(LAYER), 4 * (2 * WIDTH + 2 * FFN)
    assert many.peak() == pytest.approx(states + of_last_layer + 10**6 * (kept + gradients))


def test_a_peak_between_the_first_and_the_last_layer_is_found():
    """The later layers have experts, whose gradients are larger than their activations."""
    experts = Layer("softmax", None, FFN, 64 * FFN)
    hybrid = Costs(COSTS.cluster, replace(MODEL, layers=(LAYER,) * 6 + (experts,) * 6))
    weights = 4 * MODEL.ffn_weights(experts, stored=True)
    tokens = 0.5 * weights / hybrid.layer_bytes(LAYER)
    held = on_one_rank(hybrid, tokens)
    in_ffn = held.fixed[:12] + tokens * held.per_token[:12]
    assert in_ffn.argmax() in (5, 6) and held.peak()[0] == in_ffn.max()


def test_ranks_hold_the_whole_gradients_that_are_reduced():
    layer, outside = MODEL.layer_parameters(LAYER), 2 * VOCABULARY * WIDTH + WIDTH
    states, gathered = 12 * MODEL.parameters / 4, 4 * (outside + 2 * layer)
    first = 4 * (3 * layer / 4 + 2 * layer + VOCABULARY * WIDTH)
    end = 4 * (4 * layer / 4 + layer + 2 * outside)
    fixed = on_one_rank(COSTS, 0, ranks=4).fixed
    assert fixed[0] == fixed[LAYERS] == states + gathered + first
    assert fixed[-1] == states + gathered + end
    again = on_one_rank(COSTS, 0, ranks=4, accumulates=True).fixed
    assert again[LAYERS - 1] - fixed[LAYERS - 1] == 4 * MODEL.parameters / 4


@pytest.mark.parametrize("checkpointing", ["none", "attention", "full"])
@pytest.mark.parametrize("capacity", [1e7, 1e9])
def test_growth_fills_the_memory(checkpointing, capacity):
    held = on_one_rank(COSTS, 100, 1e5, checkpointing, ranks=4)
    factor = held.growth(capacity)
    grown = held.on(factor * held.tokens, factor * held.temporary)
    assert grown.peak() == pytest.approx(capacity)


def test_a_memory_that_parameters_fill_has_no_tokens():
    assert on_one_rank(COSTS, 100).growth(1e6) == 0


def test_the_least_offload_fits():
    held = on_one_rank(COSTS, 1000, 1e5)
    (most,), (least,) = held.peak(), held.peak(1.0)
    assert least < 0.8 * most
    capacity = 0.9 * most
    offload = held.least_offload(capacity)
    assert 0 < offload < 1 and held.peak(offload) == pytest.approx(capacity)
    assert held.least_offload(most) == 0 and held.least_offload(0.99 * least) == np.inf

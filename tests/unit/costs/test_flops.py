"""The FLOPs that MFU counts."""

from dataclasses import replace

import numpy as np
import pytest

from seqpar.costs.flops import step_flops
from seqpar.costs.model import Model

LENGTHS = np.array([100, 7])
MODEL = Model.preset("llama-8b")


def test_weights_and_visible_pairs_count_once_forward_and_twice_backward():
    pairs = sum(n * (n + 1) // 2 for n in LENGTHS)
    attention = len(MODEL.layers) * pairs * 2 * 2 * MODEL.heads * MODEL.head_dim
    assert step_flops(MODEL, LENGTHS) == 3 * (LENGTHS.sum() * MODEL.flops_per_token + attention)


def test_a_window_has_fewer_pairs():
    one = replace(MODEL.layers[0], kind="window", window=10)
    pairs = sum(min(i + 1, 10) for n in LENGTHS for i in range(n))
    model = replace(MODEL, layers=(one,))
    attention = pairs * 2 * 2 * MODEL.heads * MODEL.head_dim
    assert step_flops(model, LENGTHS) == 3 * (LENGTHS.sum() * model.flops_per_token + attention)


def test_linear_layers_read_and_write_a_state_per_token():
    hybrid = Model.preset("qwen3-next-80b")
    linear = sum(layer.kind == "linear" for layer in hybrid.layers)
    assert 0 < linear < len(hybrid.layers)
    softmax = replace(hybrid, layers=tuple(x for x in hybrid.layers if x.kind != "linear"))
    weights = 2 * sum(
        hybrid.attention_weights(x) + hybrid.ffn_weights(x)
        for x in hybrid.layers
        if x.kind == "linear"
    )
    states = linear * 2 * 2 * hybrid.state_elements
    more = step_flops(hybrid, LENGTHS) - step_flops(softmax, LENGTHS)
    assert more == pytest.approx(3 * LENGTHS.sum() * (weights + states))


@pytest.mark.parametrize("lengths", [[100, -7], [100.0], 107])
def test_only_numbers_of_tokens_are_lengths(lengths):
    with pytest.raises(ValueError, match="lengths must"):
        step_flops(MODEL, lengths)
    assert step_flops(MODEL, LENGTHS.tolist()) == step_flops(MODEL, LENGTHS)

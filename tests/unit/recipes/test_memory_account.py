"""The memory of a recipe's step, by part."""

import dataclasses

import pytest

from seqpar.costs.model import Model
from seqpar.recipes.memory_account import Footprint, Keeping

MODEL = Model.preset("qwen3-8b")
FOOTPRINT = Footprint(
    model=MODEL,
    head_norms=True,
    ranks=8,
    tokens=2**17,
    chunk=4096,
    loss_chunk=2048,
    attention=5e9,
    messages=6e9,
    kept_results=3e5,
)
LEAST = Keeping(False, 1.0)


def test_fp32_states_of_a_parameter_take_16_bytes():
    parts = FOOTPRINT.account(LEAST).parts
    states = parts["parameters"] + parts["gradients"] + parts["optimizer"]
    assert states == pytest.approx(16 * MODEL.parameters / 8)


def test_offloading_leaves_the_inputs_of_three_layers():
    row = 2 * 4096 * 2**17  # bytes
    inputs = [FOOTPRINT.account(Keeping(False, x)).parts["layer inputs"] for x in (0.0, 1.0)]
    assert inputs == [36 * row, 3 * row]


def test_kept_attention_is_added():
    kept = [FOOTPRINT.account(Keeping(True, x)).parts["results of attention"] for x in (0.0, 1.0)]
    assert kept == pytest.approx([2**17 * 3e5, 2**17 * 3e5 / 12])
    assert "results of attention" not in FOOTPRINT.account(LEAST).parts


@pytest.mark.parametrize(
    ("change", "moment"),
    [
        ({}, "attention"),
        ({"attention": 0.0, "messages": 0.0, "loss_chunk": 512}, "MLP"),
        ({"loss_chunk": 2**17}, "loss"),
        ({"tokens": 1024, "loss_chunk": 256, "attention": 0.0, "messages": 0.0}, "embedding"),
    ],
)
def test_the_moment_that_needs_most_is_chosen(change, moment):
    account = dataclasses.replace(FOOTPRINT, **change).account(LEAST)
    assert moment in account.moment
    assert account.total == pytest.approx(sum(account.parts.values()))


def test_one_gpu_gathers_no_parameters():
    assert dataclasses.replace(FOOTPRINT, ranks=1).account(LEAST).parts["gathered parameters"] == 0


def test_gradients_that_fsdp_holds_are_counted():
    """A layer's in fp32, which were reduced last, the head's in bf16, and those of the MLP."""
    layer = MODEL.layers[0]
    waiting = 4 * MODEL.layer_parameters(layer) + 2 * MODEL.vocabulary * MODEL.hidden
    parts = FOOTPRINT.account(LEAST).parts
    assert parts["gathered gradients"] == waiting + 2 * MODEL.ffn_weights(layer)

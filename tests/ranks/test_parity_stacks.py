"""Wrappers, tensor parallelism and torch's context_parallel: compared, or named as not seen."""

import pytest

from seqpar import parity
from tests.support.parity import Run, step
from tests.support.parity_stacks import (
    flash_attn,
    one_rank,
    seqpar_context_parallel,
    tensor_parallel,
    torch_context_parallel,
    torch_ring,
    with_unused_parameters,
)


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_a_wrapped_model_is_compared_to_its_gradients_and_weights(pool, tmp_path, wrapper):
    step(None, tmp_path / "one", Run(optimizer="AdamW"))
    pool(2, step, tmp_path / "many", Run(2, wrapper=wrapper, optimizer="AdamW"))
    report = parity.compare(tmp_path / "one", tmp_path / "many")
    assert report.first is None, str(report)
    stages = {x.stage for x in report.findings}
    assert {"output", "gradient of output", "gradient", "weight after"} <= stages


def test_unused_parameters_agree_and_noise_in_a_step_of_adam_is_no_difference(pool, tmp_path):
    """The gradient of the keys' bias is noise, of which Adam makes steps of full size."""
    with_unused_parameters(None, tmp_path / "one")
    pool(2, with_unused_parameters, tmp_path / "many")
    report = parity.compare(tmp_path / "one", tmp_path / "many")
    assert report.first is None, str(report)
    errors = {x.name: x.error for x in report.findings if x.stage == "weight after"}
    assert errors["model.blocks.0.qkv.bias"] > 1e-3 and errors["unused.weight"] == 0


def test_divided_features_are_named_as_not_compared(pool, tmp_path):
    one_rank(tmp_path / "one")
    pool(2, tensor_parallel, tmp_path / "many")
    report = parity.compare(tmp_path / "one", tmp_path / "many")
    assert report.first is None, str(report)
    assert "many: all ranks have the same tokens" in report.notes
    assert any("blocks.0.up: not compared: 64 features in one and 32" in x for x in report.notes)
    assert "blocks.0.up.weight" in [x.name for x in report.findings if x.stage == "gradient"]


def test_context_parallel_agrees_with_one_rank(pool, tmp_path):
    one_rank(tmp_path / "one")
    pool(2, seqpar_context_parallel, tmp_path / "two")
    report = parity.compare(tmp_path / "one", tmp_path / "two")
    assert report.first is None, str(report)


@pytest.fixture(scope="module")
def stepped(tmp_path_factory):
    """A recording of one rank, with a step of the optimizer."""
    folder = tmp_path_factory.mktemp("parity") / "one"
    one_rank(folder, steps=True)
    return folder


COMPILED = "blocks.0: compiled, so nothing inside it was seen"
DIVIDED = "blocks.0.up: not compared: 64 features in one and 32 in many"


@pytest.mark.filterwarnings("ignore")  # Dynamo's own
@pytest.mark.parametrize(
    ("how", "ranks", "note"),
    [
        ("DDP", 2, ""),
        ("FSDP2", 2, ""),
        ("checkpointing", 2, ""),
        ("compile", 2, COMPILED),
        ("tensor parallelism", 4, DIVIDED),
    ],
)
def test_attention_with_flash_attns_arguments_agrees(pool, tmp_path, stepped, how, ranks, note):
    """Whatever is around the model. What could not be seen is named."""
    pool(ranks, flash_attn, tmp_path / "many", how)
    report = parity.compare(stepped, tmp_path / "many")
    assert report.first is None, str(report)
    seen = {x.stage for x in report.findings}
    assert {"output", "loss", "gradient of output", "gradient", "weight after"} <= seen
    assert any(note in x for x in report.notes)


def test_the_ring_of_torchs_context_parallel_agrees(pool, tmp_path):
    one_rank(tmp_path / "one")
    pool(2, torch_ring, tmp_path / "many")
    report = parity.compare(tmp_path / "one", tmp_path / "many")
    assert report.first is None, str(report)


@pytest.mark.parametrize("averages", [True, False])
def test_the_order_of_torchs_context_parallel_is_found(pool, tmp_path, averages):
    one_rank(tmp_path / "one")
    pool(2, torch_context_parallel, tmp_path / "many", averages)
    report = parity.compare(tmp_path / "one", tmp_path / "many")
    assert "many: the order of tokens was found from the inputs: position_ids" in report.notes
    if averages:
        assert report.first is None, str(report)
    else:
        assert report.diagnosis.startswith("Gradients are those of a rank's tokens only")

"""The choice of a recipe's settings."""

import pytest

from seqpar.layout.layout import Layout
from seqpar.recipes.recipe import KEEPINGS, as_gpus, make_recipe
from seqpar.simulate.steps.training_step import step


@pytest.mark.parametrize(
    ("text", "shape", "device"),
    [
        ("8xh100", (1, 8), "H100"),
        ("16xh200", (2, 8), "H200"),
        ("4x8-H100", (4, 8), "H100"),
        ("2x4-a100", (2, 4), "A100"),
    ],
)
def test_gpus_are_read(text, shape, device):
    cluster = as_gpus(text)
    assert (cluster.nodes, cluster.devices_per_node) == shape and cluster.device.name == device


@pytest.mark.parametrize("text", ["h100", "8xb9", "12xh100", "0x8-h100", "4x9-h100", "8x", ""])
def test_wrong_gpus_are_refused(text):
    with pytest.raises(ValueError, match="gpus must be"):
        make_recipe("qwen3-8b", text, [4096])


def test_flash_attention_4_is_assumed_where_its_rates_are_known():
    fast, plain = (as_gpus(x).device.attention for x in ("8xh100", "8xh800"))
    assert fast.forward[-1, -1] < plain.forward[-1, -1] / 2


def test_less_memory_keeps_less():
    most, least = (make_recipe("qwen3-8b", "8xh100", [2**18], memory_gb=x) for x in (70, 34))
    assert KEEPINGS.index(most.keeping) < KEEPINGS.index(least.keeping)
    assert least.memory.total <= 34e9 < most.memory.total <= 70e9
    assert most.step_seconds <= least.step_seconds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("qwen9", "8xh100", [4096]), "model must be one of"),
        (("qwen3-8b", "8xh100", [7]), "at least 8 tokens"),
        (("mixtral-8x7b", "8xh100", [2**20]), "use more GPUs or fewer tokens"),
    ],
)
def test_what_cannot_run_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_recipe(*arguments)


def test_memory_must_exist():
    with pytest.raises(ValueError, match="memory_gb must be above 0 and at most 80 GB"):
        make_recipe("qwen3-8b", "8xh100", [4096], memory_gb=81)


def test_seconds_are_those_of_the_simulated_step():
    """Each part may be largest on another rank, but the sum is the time of the whole step."""
    recipe = make_recipe("qwen3-next-80b", "16xh200", [2**14])
    costs, model = recipe.costs, recipe.costs.model
    keeping = recipe.keeping
    simulated = step(
        recipe.strategy,
        getattr(Layout, recipe.layout)([0, 2**14], 16),
        costs.cluster,
        model,
        checkpointing="attention" if keeping.attention else "full",
        sharding="full",
        offload=keeping.offload,
        optimizer=True,
    )
    chunked = sum(2 * model.ffn_weights(x) for x in model.layers) * 2**10
    again = chunked / costs.cluster.device.reached_rate + simulated.head / 3
    assert recipe.step_seconds == pytest.approx(simulated.seconds + again)

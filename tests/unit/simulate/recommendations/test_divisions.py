"""Ways to divide devices and documents, and the search for the best of them."""

import dataclasses

import numpy as np
import pytest

import seqpar
from seqpar.balance import Cluster, Costs, Model
from seqpar.simulate.recommendations import divisions as rooms
from seqpar.simulate.recommendations.divisions import divisions
from seqpar.simulate.recommendations.predicting import too_large
from seqpar.simulate.recommendations.searching import lower_bounds
from seqpar.simulate.recommendations.ways import ways_of
from tests.unit.simulate.steps.test_training_step import CLUSTER, MODEL, SMALL

LENGTHS = [6000, 500, 0, 400, 300, 200, 100, 500, 192]
HYBRID = Model.from_config(
    SMALL
    | {"model_type": "qwen3_next", "full_attention_interval": 2}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
)


@pytest.mark.parametrize("name", ["1x8-h100", "2x4-h100", "3x2-h100"])
@pytest.mark.parametrize("model", [MODEL, HYBRID], ids=["softmax", "hybrid"])
def test_divisions_use_all_devices_and_documents(name, model):
    cluster = Cluster.preset(name)
    found = list(divisions(np.array(LENGTHS), Costs(cluster, model)))
    assert len({(x.parallelism, x.micro_batches) for x in found}) == len(found) >= 4
    for x in found:
        data, pipeline, tensor, context = x.parallelism
        assert x.parallelism.devices == cluster.ranks
        assert context < cluster.ranks or x.micro_batches > 1
        assert not (len(model.layers) % pipeline or cluster.devices_per_node % tensor)
        group, node = context * tensor, cluster.devices_per_node
        assert group % node == 0 or node % group == 0
        assert len(x.batches) == data and {len(micro) for micro in x.batches} == {x.micro_batches}
        documents = [i for micro in x.batches for batch in micro for i in batch]
        assert sorted(documents) == [i for i, n in enumerate(LENGTHS) if n]
        assert x.shares.max() == x.shares[0] == 1 and x.largest in {
            batch for micro in x.batches for batch in micro
        }


def test_context_groups_are_small_enough_to_simulate(monkeypatch):
    monkeypatch.setattr(rooms, "MAX_CONTEXT_RANKS", 2)
    found = divisions(np.array(LENGTHS), Costs(Cluster.preset("2x4-h100"), MODEL))
    assert {x.parallelism.context for x in found} == {1, 2}


def test_large_context_groups_are_tried_with_few_messages():
    """Few ranks of a zigzag layout stand for all. In a contiguous one, rows of 4 are alike."""
    costs = Costs(Cluster.preset("32x8-h100"), MODEL)
    (division,) = (x for x in divisions(np.array([2**17]), costs) if x.parallelism.context == 256)
    first, others = ({x.name for x in ways_of(division, costs, more)} for more in (False, True))
    tried = {tuple(name.split(", ")[:2]) for name in first}
    zigzag = {("usp 32x8", "zigzag"), ("usp 64x4", "zigzag")}
    assert tried == {*zigzag, ("usp 64x4", "contiguous")}
    assert not others


def test_parameters_that_do_not_fit_are_not_tried():
    tight = dataclasses.replace(CLUSTER.device, memory=1e6)
    costs = Costs(dataclasses.replace(CLUSTER, device=tight), MODEL)
    assert not list(divisions(np.array(LENGTHS), costs))


def test_more_micro_batches_are_tried_to_fit():
    costs = Costs(CLUSTER, MODEL)
    needed = float(costs.activation_bytes(2048)) + costs.parameter_bytes(4)
    tight = dataclasses.replace(CLUSTER.device, memory=needed / 2)
    found = list(divisions(np.full(64, 128), Costs(CLUSTER, MODEL)))
    assert {x.micro_batches for x in found if x.parallelism.pipeline == 1} == {1}
    cluster = dataclasses.replace(CLUSTER, device=tight)
    found = list(divisions(np.full(64, 128), Costs(cluster, MODEL)))
    assert max(x.micro_batches for x in found if x.parallelism.pipeline == 1) > 1


@pytest.fixture(scope="module")
def complete():
    """All ways, simulated."""
    return seqpar.recommend(MODEL, CLUSTER, LENGTHS, simulate_all=True, parallelism="all")


@pytest.mark.exhaustive
def test_the_search_finds_the_fastest_way(complete):
    found = seqpar.recommend(MODEL, CLUSTER, LENGTHS, parallelism="all")
    assert found[0].seconds == complete[0].seconds
    assert len(found) < len(complete) and not any(x.excluded for x in complete)
    assert {x.parallelism.context for x in complete if not x.servers} == {1, 2, 4}
    assert {x.parallelism.pipeline for x in complete} >= {1, 2, 4}
    simulated = {x.name: x.seconds for x in complete}
    for x in found:
        if x.excluded:
            assert found[0].seconds < x.seconds <= (1 + 1e-9) * simulated[x.name]
    inside = seqpar.recommend(MODEL, CLUSTER, LENGTHS)[0]
    assert found[0].seconds <= inside.seconds == simulated[inside.name]


def test_bounds_do_not_exceed_what_is_simulated(complete):
    costs = Costs(CLUSTER, MODEL)
    for x in complete:
        if x.division is None or x.seconds == np.inf:
            continue
        bounds = list(lower_bounds(x, costs))
        assert bounds == sorted(bounds)
        assert max(bounds) <= (1 + 1e-9) * x.seconds
        even = x.division.least_seconds
        assert even <= 1.02 * x.seconds  # a grid's costs are not exactly proportional


def test_ways_that_fit_are_never_too_large(complete):
    for x in complete:
        if x.seconds < np.inf:
            device = dataclasses.replace(CLUSTER.device, memory=x.memory)
            costs = Costs(dataclasses.replace(CLUSTER, device=device), MODEL)
            assert too_large(x, costs) is None, x.name


WINDOWS = Model.from_config(
    SMALL
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 128}
    | {"max_window_layers": 2, "vocab_size": 100000}
    | {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2}
)


def test_bounds_hold_for_unequal_stages():
    """The last stage is the cheap one, and has the head."""
    pair = Cluster.preset("1x2-h100")
    costs = Costs(pair, WINDOWS)
    found = seqpar.recommend(WINDOWS, pair, [4096] * 8, parallelism="all", simulate_all=True)
    staged = [x for x in found if x.parallelism.pipeline == 2]
    assert len({x.division.micro_batches for x in staged}) > 1
    for x in staged:
        assert max(lower_bounds(x, costs)) <= (1 + 1e-9) * x.seconds


@pytest.mark.parametrize("name", ["1x1-h100", "1x2-h100"])
def test_too_large_a_batch_is_computed_in_parts(name):
    costs = Costs(CLUSTER, MODEL)
    one_document = 1.5 * float(costs.activation_bytes(4096)) + costs.parameter_bytes(1)
    tight = dataclasses.replace(CLUSTER.device, memory=one_document)
    cluster = dataclasses.replace(Cluster.preset(name), device=tight)
    assert seqpar.recommend(MODEL, cluster, [4096] * 24)[0].seconds == np.inf
    best = seqpar.recommend(MODEL, cluster, [4096] * 24, parallelism="all")[0]
    assert best.memory <= one_document and best.division.micro_batches > 1


def test_one_document_is_divided_over_thousands_of_devices():
    costs = Costs(Cluster.preset("2048x8-h100"), Model.preset("llama-8b"))
    found = list(divisions(np.array([2**20]), costs))
    assert found and all(x.parallelism.devices == 16384 for x in found)
    alone = Model.from_config(SMALL | {"num_attention_heads": 1, "num_key_value_heads": 1})
    with pytest.raises(ValueError, match="cannot be divided over 16384 devices"):
        seqpar.recommend(alone, Cluster.preset("2048x8-h100"), [5], parallelism="all")


def test_micro_batches_are_dealt_by_work():
    """Many short documents cost tensor ranks no more latency than one."""
    costs = Costs(Cluster.preset("2x8-h100"), Model.preset("llama-8b"))
    lengths = np.array([16000] + [64] * 2000)
    (found,) = (
        x
        for x in divisions(lengths, costs)
        if x.parallelism[:3] == (2, 1, 8) and x.micro_batches == 1
    )
    tokens = [lengths[[*batch]].sum() for (batch,) in found.batches]
    assert max(tokens) <= 1.3 * min(tokens)


def test_micro_batches_may_be_planned_differently():
    lengths = [349, 3705, 3434, 604, 1226, 2714, 872, 2623, 3374, 3122, 1543, 6450, 9494]
    costs, ways = Costs(CLUSTER, MODEL), 0
    for division in divisions(np.array(lengths), costs):
        for way in ways_of(division, costs):
            if way.layout_name not in ("zigzag", "contiguous"):
                ways += 1
                assert way.code.count("spans") >= 2
    assert ways


def test_names_say_what_is_divided(complete):
    names = {x.name for x in complete}
    assert "data 4" in names and "ring, zigzag, tensor 2, context 2" in names
    assert "ring, zigzag" in names and len(names) == len(complete)
    assert any("pipeline 2" in x and x.endswith("4 micro-batches") for x in names)


def test_one_way_has_all_of_its_documents(complete):
    planned = [
        x for x in complete if x.division and x.layout_name not in ("zigzag", "contiguous", "whole")
    ]
    assert planned
    for x in complete:
        documents = [i for micro in x.batches for batch in micro for i in batch]
        assert {*documents} >= {*x.documents}
        lengths = np.diff(x.layout.cu_seqlens).tolist()
        assert [LENGTHS[i] for i in x.documents] == lengths


@pytest.mark.parametrize("cluster", ["cores", "gpus"])
def test_wrong_parallelism_is_named(cluster):
    if cluster == "cores":
        cores = dataclasses.replace(CLUSTER, overlaps=False)
        with pytest.raises(ValueError, match='parallelism must be "context" on the cores'):
            seqpar.recommend(MODEL, cores, LENGTHS, parallelism="all")
    else:
        with pytest.raises(ValueError, match='parallelism must be "context" or "all", got'):
            seqpar.recommend(MODEL, CLUSTER, LENGTHS, parallelism="data")

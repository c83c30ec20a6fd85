"""Steps on devices that are divided into data, pipeline, tensor and context ranks."""

import dataclasses

import numpy as np
import pytest

from seqpar import Layout, simulate
from seqpar.balance import Cluster, Costs, FatTree, Link, Model
from seqpar.simulate.steps.divided import (
    DividedCosts,
    MicroBatches,
    Parallelism,
    divided_step,
    tensor_sizes,
)
from tests.unit.simulate.steps.test_training_step import CLUSTER, LAYOUT, MODEL, SMALL

EIGHT = Cluster.preset("1x8-h100")
NODES = Cluster.preset("4x8-h100")
PAIR = Layout.zigzag([0, 3000, 8192], 2)
HIDDEN = 512
ONE = np.ones(1)


def costs_of(cluster=CLUSTER, model=MODEL, **sizes):
    return DividedCosts(Costs(cluster, model), Parallelism(**sizes))


def stepped(divided, layout=PAIR, shares=ONE, **options):
    return divided_step("ring", MicroBatches(layout, shares, layout.tokens), divided, **options)


def test_context_ranks_alone_are_a_step():
    """Where the exchange of parameters is hidden."""
    found = stepped(costs_of(context=4), LAYOUT)
    plain = simulate.step("ring", LAYOUT, CLUSTER, MODEL, optimizer=True)
    assert found.seconds == pytest.approx(plain.seconds, rel=1e-12)
    assert found.memory == pytest.approx(plain.memory, rel=1e-6)
    assert (found.bytes == plain.bytes).all()


@pytest.mark.parametrize(("checkpointing", "exchanges"), [("none", 8), ("attention", 12)])
def test_tensor_ranks_add_their_exchanges(checkpointing, exchanges):
    """A device has half of the heads, and half of the widths of feed-forward parts."""
    link = Link(1e-5, 1e10)
    cluster = dataclasses.replace(CLUSTER, inside=link)
    found = stepped(costs_of(cluster, tensor=2, context=2), checkpointing=checkpointing)
    half = Model.from_config(SMALL | {"head_dim": 64, "vocab_size": 500} | {
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512
    })  # fmt: skip
    two = dataclasses.replace(cluster, devices_per_node=2)
    alone = simulate.step("ring", PAIR, two, half, optimizer=True, checkpointing=checkpointing)
    moved = exchanges * (1e-5 + max(PAIR.tokens_per_rank) * HIDDEN * 2 / 2 / 1e10)
    assert found.seconds == pytest.approx(alone.seconds + 4 * moved, rel=1e-3)


def test_tensor_ranks_share_activations_by_tokens():
    none, two = (stepped(costs_of(tensor=n, context=2)) for n in (1, 2))
    each, _ = Costs(CLUSTER, MODEL).activation_bytes_per_token()
    saved = (none.memory - two.memory).min()
    assert saved >= 4096 * each / 2  # and parameters


def test_parameters_cross_into_each_node_once():
    inside, nodes = costs_of(EIGHT, context=8), costs_of(NODES, data=4, context=8)
    rate, between = NODES.inside.rate, NODES.between.rate
    assert inside.sharded_seconds(1e9, 3) == pytest.approx(3 * 2e9 * 7 / 8 / rate)
    into_a_node = 3 * 2e9 * 3 / 4 / (NODES.nics * between)
    assert nodes.sharded_seconds(1e9, 3) == pytest.approx(max(into_a_node, 6e9 * 31 / 32 / rate))
    slow = dataclasses.replace(NODES, between=Link(0.0, 1e8))
    shares = costs_of(slow, data=4, tensor=2, context=4).sharded_seconds(5e8, 3)
    assert shares == pytest.approx(3 * 2e9 * 3 / 4 / (NODES.nics * 1e8))


def test_parameters_take_the_uplinks_into_each_node():
    """Of two leaves of two nodes, with an eighth of their NICs' rate."""
    slow = dataclasses.replace(NODES, between=Link(0.0, 1e8), fabric=FatTree(2, 8.0))
    into_two_nodes = 2 * 3 * 2e9 / 2
    uplinks = 2 * NODES.nics * 1e8 / 8
    for sizes in ({"data": 4, "context": 8}, {"data": 4, "tensor": 2, "context": 4}):
        parameters = 1e9 / sizes.get("tensor", 1)
        seconds = costs_of(slow, **sizes).sharded_seconds(parameters, 3)
        assert seconds == pytest.approx(into_two_nodes / uplinks)
    within_a_leaf = costs_of(slow, pipeline=2, data=2, context=8).sharded_seconds(1e9, 3)
    assert within_a_leaf == pytest.approx(3 * 2e9 / 2 / (NODES.nics * 1e8))


def test_all_experts_are_exchanged():
    experts = Model.preset("mixtral-8x7b")
    nodes = Cluster.preset("2x8-h100")
    layout = Layout.zigzag(16384, 16)
    one = simulate.step("ring", layout, nodes, experts, sharding="full", optimizer=True)
    same = stepped(costs_of(nodes, experts, context=16), layout)
    assert one.seconds == pytest.approx(same.seconds, rel=0.3)
    ((outcome, _),) = one.layers.values()
    stored = 3 * 2 * experts.layer_parameters(experts.layers[0])
    assert outcome.sent_bytes.min() >= stored * 15 / 16


def test_an_exposed_exchange_takes_its_time():
    slow = dataclasses.replace(EIGHT, inside=Link(0.0, 1e6))
    divided = costs_of(slow, data=8)
    found = stepped(divided, Layout.contiguous(512, 1))
    layer = MODEL.layer_parameters(MODEL.layers[0])
    assert found.seconds == pytest.approx(4 * 3 * layer * 2 * 7 / 8 / 1e6, rel=0.01)


def test_micro_batches_take_their_shares_of_the_largest():
    divided = costs_of(data=2, context=2)
    one, more = stepped(divided), stepped(divided, shares=np.array([1.0, 0.5, 0.25]))
    assert more.seconds - more.optimizer == pytest.approx(1.75 * (one.seconds - one.optimizer))
    assert (more.bytes == (1.75 * one.bytes).astype(int)).all()


def test_stages_follow_1f1b():
    """Two stages and equal micro-batches take (m + S − 1) times a stage's time."""
    fast = dataclasses.replace(CLUSTER, inside=Link(0.0, 1e18))
    divided = costs_of(fast, pipeline=2, context=2)
    for count in (1, 4):
        seconds = divided.played([1.0] * 4, 0.0, np.ones(count), 100)
        end = divided.played([0.0] * 4, 0.0, np.ones(count), 100)
        assert seconds - end == pytest.approx(2 * (count + 1))


@pytest.mark.parametrize("head", [0.0, 3.0])
def test_no_pipeline_is_faster_than_its_bound(head):
    rng = np.random.default_rng(0)
    for stages in (1, 2, 4):
        divided = costs_of(EIGHT, pipeline=stages, context=2, data=4 // stages)
        for _ in range(40):
            shares = rng.uniform(0.2, 1.0, rng.integers(1, 9))
            layers = rng.uniform(0.5, 2.0, 4) * rng.choice([1, 0.1, 10], 4)
            least = divided.least_seconds(layers.sum() + head, shares)
            played = divided.played(layers.tolist(), head, shares, 0)
            assert least <= (1 + 1e-9) * played
            if stages == 1:
                assert least == pytest.approx(played)


def test_the_largest_micro_batch_passes_all_stages():
    """Next to short ones, it alone determines the bound."""
    divided = costs_of(pipeline=4)
    shares = np.array([1.0, 0.01, 0.01])
    least = divided.least_seconds(4.0, shares)
    assert least == 4.0 + divided.end_seconds
    assert least <= divided.played([1.0] * 4, 0.0, shares, 0) <= 1.02 * least


def test_ranks_wait_for_tensor_ranks_and_other_stages():
    plain = stepped(costs_of(data=2, context=2), shares=np.ones(2))
    tensor = stepped(costs_of(tensor=2, context=2), shares=np.ones(2))
    staged = stepped(costs_of(pipeline=2, context=2), shares=np.ones(2))
    moved = 2 * 4 * costs_of(tensor=2, context=2).tensor_seconds(max(PAIR.tokens_per_rank))
    assert (tensor.spent("waiting") >= moved * (1 - 1e-9)).all()
    assert staged.spent("waiting").min() > plain.spent("waiting").max()
    assert plain.head == 2 * stepped(costs_of(data=2, context=2)).head


def test_a_stage_has_its_part_of_the_memory():
    """A pipeline holds a micro-batch per stage, so activations stay; parameters do not."""
    whole, halves = costs_of(data=2, context=2), costs_of(pipeline=2, context=2)
    each, once = Costs(CLUSTER, MODEL).activation_bytes_per_token("attention")
    assert whole.activation_bytes(100, "attention", 4) == 100 * (each + once)
    assert halves.activation_bytes(100, "attention", 4) == 100 * (each + once)
    assert halves.activation_bytes(100, "attention", 1) == 100 * (each / 2 + once)
    layers = 2 * MODEL.layer_parameters(MODEL.layers[0])
    parameters = layers + MODEL.vocabulary * HIDDEN + HIDDEN
    assert halves.parameter_bytes() == parameters * 4 + parameters * 12 // 2


def test_tensor_ranks_divide_heads_and_nodes():
    assert tensor_sizes(MODEL, EIGHT) == [1, 2, 4]  # 4 KV heads
    assert tensor_sizes(MODEL, Cluster.preset("1x6-h100")) == [1, 2]
    assert tensor_sizes(Model.preset("llama-8b"), NODES) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("tensor", "nics", "expected"),
    [
        (1, 8, (8, 8, 1.0)),
        (2, 8, (4, 4, 1.0)),
        (8, 8, (1, 1, 1.0)),
        (8, 4, (1, 1, 0.5)),
        (4, 7, (2, 1, 1.75)),
    ],
)
def test_context_groups_share_the_nics(tensor, nics, expected):
    cluster = dataclasses.replace(NODES, nics=nics)
    model = Model.preset("llama-8b")
    group = costs_of(cluster, model, tensor=tensor, context=32 // tensor).context.cluster
    devices, whole, part = expected
    assert (group.nodes, group.devices_per_node, group.nics) == (4, devices, whole)
    assert group.between.rate == part * cluster.between.rate

"""Costs: values computed by hand, sums over layers, messages and memory, and planners' sizes."""

import time
from dataclasses import replace

import numpy as np
import pytest

from seqpar import Layout
from seqpar.balance import Cluster, Costs, Model, Tasks
from seqpar.costs.grid import causal_pairs
from seqpar.costs.model import Layer
from seqpar.layout.masks.mask import Mask, slices_between
from tests.support.tiers import few_rows

H100 = Cluster.preset("4x8-h100")
LLAMA, HYBRID, GEMMA = map(Model.preset, ("llama-8b", "qwen3-next-80b", "gemma3-12b"))


def small(*kinds, **changes):
    """A model of layers of some kinds, 64 heads of 128 and all else small."""
    layers = [Layer(kind, 1024 if kind == "window" else None, 300, 300) for kind in kinds]
    model = Model("small", tuple(layers), 100, 64, 8, 128, 50, recurrence=HYBRID.recurrence)
    return replace(model, **changes)


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(128, 0.030e-3), (1024, 0.133e-3), (8192, 3.71e-3), (65536, 206e-3)]
)
def test_attention_of_a_document_takes_published_time(tokens, seconds):
    costs = Costs(H100, small("softmax", "softmax"))
    task = Tasks.of(tokens, tokens, causal_pairs(0, tokens))
    assert costs.attention(task) == pytest.approx(seconds)
    assert costs.span_seconds(0, tokens) == pytest.approx(2 * seconds, rel=0.02)
    assert costs.span_seconds(0, tokens, backward=True) == pytest.approx(5.16 * seconds, rel=0.02)
    if tokens > 128:  # which keeps half of the device idle anyway
        assert costs.attention(task, heads=32) < 0.8 * seconds


def test_what_a_device_computes_and_reads_by_hand():
    costs = Costs(H100, LLAMA)
    flops = 32 * 2 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 2 * 4096 * 128256
    assert costs.tokenwise(8192) == pytest.approx(8192 * flops / (0.5 * 989.4e12))
    assert costs.tokenwise(8192, backward=True) == pytest.approx(2 * costs.tokenwise(8192))
    # a token alone waits for the weights
    assert costs.tokenwise(1) == pytest.approx(flops / 2 * 2 / 3.35e12)
    np.testing.assert_array_equal(costs.tokenwise([0, 1, 2]) > 0, [False, True, True])


def test_linear_attention_by_hand():
    costs = Costs(Cluster.preset("1x8-h200"), small("linear", "linear"))
    once = 2 * costs.call_seconds() / 2
    each = 32 * 1536 / (0.9 * 4.8e12)  # heads × bytes of a token over the memory's rate
    assert costs.span_seconds(0, 4096) == pytest.approx(once + 2 * 4096 * each)
    back = costs.span_work(0, 4096, backward=True) / costs.span_work(0, 4096)
    assert back == pytest.approx(3584 / 1536)
    with pytest.raises(ValueError, match="model must have linear layers"):
        Costs(H100, LLAMA).recurrent_call(10)


def test_kinds_of_layers_cost_what_they_see():
    """At 256 K tokens a window of 1,024 costs little, and linear layers as much a token as ever."""
    tokens = 2**18
    softmax, window, linear = (
        Costs(H100, small(kind)).span_work(0, tokens) for kind in ("softmax", "window", "linear")
    )
    assert softmax > 50 * window > 50 * linear
    all_three = Costs(H100, small("softmax", "window", "linear", "window"))
    expected = softmax + 2 * window + linear
    assert all_three.span_work(0, tokens) == pytest.approx(expected)
    for kind, ratio in (("softmax", 4), ("window", 2), ("linear", 2)):
        costs = Costs(H100, small(kind))
        assert costs.span_work(0, 2 * tokens) / costs.span_work(0, tokens) == pytest.approx(
            ratio, rel=0.02
        )


@few_rows()
@pytest.mark.parametrize("model", [LLAMA, HYBRID, GEMMA], ids=lambda model: model.name)
@pytest.mark.parametrize("backward", [False, True])
def test_spans_of_a_rank_are_one_call(model, backward):
    costs, generator = Costs(H100, model), np.random.default_rng(0)
    starts = generator.integers(0, 10**5, 50)
    stops = starts + generator.integers(0, 10**4, 50)
    owner = generator.integers(0, 3, 50)
    found = costs.span_seconds(starts, stops, owner, 4, backward)
    work = np.bincount(owner, costs.span_work(starts, stops, backward), 4)
    expected = np.where(work > 0, costs.call_seconds(backward) + work, 0.0)
    np.testing.assert_allclose(found, expected)
    assert found[3] == 0


def test_zigzag_slices_cost_what_their_pairs_cost():
    """All of 4 ranks have as many pairs; in some hops only half of a rank's rows see any key."""
    costs, geometry = Costs(H100, LLAMA), Layout.zigzag(2**15, 4).geometry
    mask = Mask.of(True, (-1, -1), None, geometry)
    hops = np.array(
        [
            [costs.slice_seconds(slices_between(geometry, a, geometry, b, mask)) for b in range(4)]
            for a in range(4)
        ]
    )
    ranks = hops.sum(1)
    assert ranks.min() < ranks.max() < 1.06 * ranks.min()
    whole = costs.attention(Tasks.of(2**15, 2**15, causal_pairs(0, 2**15)))
    assert whole < hops.sum() < 1.3 * whole


def test_cut_documents_cost_no_less_than_whole_ones():
    costs, cuts = Costs(H100, LLAMA), np.array([0, 1000, 5000, 20000, 65536])
    parts = costs.span_work(cuts[:-1], cuts[1:]).sum()
    whole = costs.span_work(0, 65536)
    assert whole <= parts * (1 + 1e-3) and parts < 1.1 * whole


@pytest.mark.parametrize(
    ("link", "options", "seconds"),
    [
        ("inside", {}, 10e-6 + 1e8 / (0.65 * 450e9)),
        ("host", {}, 10e-6 + 1e8 / (0.9 * 64e9)),
        ("between", {}, 20e-6 + 1e8 / 45e9),
        ("between", {"senders": 8}, 20e-6 + 1e8 / 45e9),  # each has a NIC
        ("between", {"nics": 4}, 20e-6 + 2.5e7 / 45e9 + 2 * (10e-6 + 7.5e7 / (0.65 * 450e9))),
        ("between", {"nics": 8, "senders": 4}, 20e-6 + 5e7 / 45e9 + 20e-6 + 1.75e8 / 292.5e9),
    ],
)
def test_messages_by_hand(link, options, seconds):
    costs = Costs(H100, LLAMA)
    assert costs.message(1e8, link, **options) == pytest.approx(seconds)
    assert costs.message(0, link, **options) == 0


def test_devices_that_share_nics_wait_for_each_other():
    costs = Costs(Cluster.preset("2x8-a800"), LLAMA)
    assert costs.message(1e8, "between", senders=8) == pytest.approx(20e-6 + 2e8 / 22.5e9)


@pytest.mark.parametrize(
    ("cluster", "call", "named"),
    [
        ("4x8-h100", {"link": "wifi"}, "link"),
        ("1x8-h100", {"link": "between"}, "one node"),
        ("4x8-a800", {"link": "between", "nics": 5}, "nics"),
        ("4x8-h100", {"link": "between", "nics": 0}, "nics"),
        ("4x8-h100", {"link": "between", "senders": 0}, "senders"),
    ],
)
def test_messages_that_there_are_not(cluster, call, named):
    with pytest.raises(ValueError, match=named):
        Costs(Cluster.preset(cluster), LLAMA).message(1, **call)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda costs: costs.tokenwise(-1), "tokens"),
        (lambda costs: costs.tokenwise([1, float("nan")]), "tokens"),
        (lambda costs: costs.message(-1), "nbytes"),
        (lambda costs: costs.kv_bytes(-1), "tokens"),
        (lambda costs: costs.activation_bytes(-1), "tokens"),
        (lambda costs: costs.span_work(-1, 5), "starts"),
        (lambda costs: costs.span_work(6, 5), "stops"),
        (lambda costs: costs.span_seconds([0], [5], [0.5], 2), "owner"),
        (lambda costs: costs.span_seconds([0], [5], [2], 2), "owner"),
        (lambda costs: costs.span_seconds([0], [5], owners=0), "owners"),
        (lambda costs: costs.attention(Tasks.of(1, 1, 1), heads=0), "heads"),
    ],
)
def test_amounts_that_there_are_not(call, named):
    with pytest.raises(ValueError, match=named):
        call(Costs(H100, LLAMA))


def test_descriptions_are_not_exchanged():
    with pytest.raises(TypeError, match="cluster must be a Cluster"):
        Costs(LLAMA, H100)
    with pytest.raises(TypeError, match="inside must be a Link"):
        replace(H100, inside=5)
    costs = Costs("4x8-h100", "llama-8b")
    assert (costs.cluster, costs.model) == (H100, Model.preset("llama-8b"))
    assert hash(H100) == hash(Cluster.preset("4x8-h100")) and hash(LLAMA)


def test_nothing_costs_nothing():
    costs = Costs(H100, HYBRID)
    np.testing.assert_array_equal(costs.span_seconds([], [], [], 3), np.zeros(3))
    np.testing.assert_array_equal(costs.span_seconds([0, 7], [0, 7]), [0])
    assert costs.span_work([], []).size == 0


def test_bytes_that_travel():
    assert Costs(H100, LLAMA).kv_bytes(1000) == 1000 * 2 * 8 * 128 * 2
    assert Costs(H100, HYBRID).state_bytes() == 32 * 128 * 128 * 4
    assert Costs(H100, LLAMA).state_bytes() == 0


def test_states_and_moments_have_8_bytes_in_fp64():
    fp64 = replace(H100, device=replace(H100.device, dtype="float64"))
    costs = Costs(fp64, HYBRID)
    assert costs.state_bytes() == 32 * 128 * 128 * 8
    assert costs.parameter_bytes(stage=0) == (8 + 8 + 2 * 8) * HYBRID.parameters
    moved = (2 * 8 + 4 * 8 + 8) * HYBRID.parameters
    assert costs.optimizer_seconds(stage=0) == moved / H100.device.memory_bandwidth
    attention = Costs(fp64, LLAMA).kept_bytes(1, "attention") - 32 * 4096 * 8
    assert attention == 32 * 32 * (128 * 8 + 8)


def test_activations_by_hand():
    """Llama 8B: hidden 4,096, queries 4,096, keys and values 2,048, feed-forward part 14,336."""
    costs = Costs(H100, LLAMA)
    layer = (4 * 4096 + 4096 + 2048 + 4 * 14336 + 4096) * 2 + 32 * 4 + 2 * 2 * 4
    assert costs.activation_bytes(1000) == costs.kept_bytes(1000) == 1000 * 32 * layer
    assert costs.kept_bytes(10, "full") == 10 * 32 * 4096 * 2
    assert costs.activation_bytes(1, "full") == 32 * 4096 * 2 + (layer - 4096 * 2)
    kept = 4096 * 2 + 4096 * 2 + 32 * 4
    assert costs.activation_bytes(1, "attention") == 32 * kept + (layer - kept)
    with pytest.raises(ValueError, match="checkpointing"):
        costs.activation_bytes(1, "some")


@pytest.mark.parametrize(("stage", "bytes_each"), [(0, 16), (1, 4 + 12 / 32), (2, 2 + 14 / 32)])
def test_parameters_by_hand(stage, bytes_each):
    costs = Costs(H100, LLAMA)
    assert costs.parameter_bytes(stage=stage) == pytest.approx(bytes_each * LLAMA.parameters, abs=1)


def test_sharded_parameters_come_with_two_gathered_layers():
    costs = Costs(H100, LLAMA)
    gathered = 2 * 2 * LLAMA.layer_parameters(LLAMA.layers[0])
    assert costs.parameter_bytes() == pytest.approx(16 / 32 * LLAMA.parameters + gathered, abs=1)
    assert costs.parameter_bytes(ranks=1) == 16 * LLAMA.parameters
    for wrong in ({"stage": 4}, {"stage": -1}, {"ranks": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            costs.parameter_bytes(**wrong)
        with pytest.raises(ValueError, match=next(iter(wrong))):
            costs.optimizer_seconds(**wrong)


def test_how_many_tokens_fit():
    costs = Costs(H100, LLAMA)
    for checkpointing in ("none", "attention", "full"):
        tokens = costs.token_capacity(checkpointing)
        room = 80e9 - costs.parameter_bytes()
        assert costs.activation_bytes(tokens, checkpointing) <= room
        assert costs.activation_bytes(tokens + 1, checkpointing) > room
    assert Costs(Cluster.preset("1x1-h100"), Model.preset("llama-70b")).token_capacity() == 0


def test_costs_are_quick_for_100_000_documents():
    generator = np.random.default_rng(0)
    lengths = generator.integers(100, 50000, 100_000)
    owner = generator.integers(0, 4096, lengths.size)
    costs = Costs(Cluster.preset("512x8-h100"), GEMMA)
    seconds = min(_timed(costs, lengths, owner) for _ in range(3))
    assert seconds < 0.5  # 0.1 on an idle core of 2.6 GHz


def _timed(costs, lengths, owner):
    start = time.process_time()
    costs.span_seconds(0, lengths, owner, 4096)
    return time.process_time() - start

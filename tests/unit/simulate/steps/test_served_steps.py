"""Steps of trainers whose attention servers compute, and how they are recommended."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import torch.distributed as dist

import seqpar
from seqpar import Layout, simulate
from seqpar.__main__ import main
from seqpar.balance import Cluster, Costs, Link, Model
from seqpar.simulate.candidates import Candidate
from seqpar.simulate.recommendations import ways
from seqpar.simulate.recording.serving import RecordedPool
from seqpar.simulate.steps.recorded_layers import Attending, Products, nano_batches, record_layers
from seqpar.simulate.steps.training_step import least_trainer_seconds
from tests.support.tiers import few_rows
from tests.unit.simulate.steps.test_training_step import CLUSTER, MODEL, PAIR, SMALL

FAST = Link(0.0, 1e30)
FREE = dataclasses.replace(PAIR, inside=FAST, host=FAST)
TWO = Layout.from_spans([[(0, 0, 2048), (1, 0, 2048)]], [0, 2048, 4096])  # one trainer's
ONE = Layout.contiguous(4096, 1)


@pytest.fixture
def quick(monkeypatch):
    """Of the strategies in place recommend knows one."""
    monkeypatch.setattr(ways, "candidates", lambda *_: [Candidate("ring")])


def of_layers(layers):
    return dataclasses.replace(MODEL, layers=MODEL.layers[:1] * layers)


def served(layout, cluster=FREE, model=MODEL, **options):
    given = {"servers": 1, "tasks": 4} | options
    return simulate.step("disaggregated", layout, cluster, model, **given)


@pytest.mark.parametrize(("layout", "turns"), [(TWO, True), (ONE, False)])
def test_each_added_layer_costs_the_busier_side(layout, turns):
    """By turns; with one document trainer and server wait for each other."""
    tasks = 4 if turns else 1
    few, many = (served(layout, model=of_layers(n), tasks=tasks) for n in (2, 6))
    busy = (many.spent("busy") - few.spent("busy")) / 4
    further = (many.seconds - few.seconds) / 4
    expected = busy.max() if turns else busy.sum()
    assert further == pytest.approx(expected, rel=0.02)
    assert busy.min() > 0.05 * busy.max()


@pytest.mark.parametrize("documents", [[4096], [3000, 500, 596]])
@pytest.mark.parametrize("cluster", [PAIR, FREE])
def test_no_bound_exceeds_a_step_with_servers(documents, cluster):
    layout = Layout.contiguous(np.r_[0, np.cumsum(documents)], 1)
    bound = least_trainer_seconds(layout, Costs(cluster, MODEL))
    assert 0 < bound < served(layout, cluster).seconds < 100 * bound


@pytest.mark.exhaustive
def test_it_is_as_if_all_layers_were_played():
    """Three of them, against what the first two predict."""
    found = served(TWO, model=of_layers(3))
    layer = MODEL.layers[0]
    products = Products(*2 * [float(MODEL.attention_weights(layer) + MODEL.ffn_weights(layer))], 2)
    attending = Attending(MODEL, layer, getattr(torch, FREE.device.dtype))
    programs = record_layers(TWO, 1, attending, products, 3, copies=True, tasks=4)
    played = simulate.play(programs, FREE).seconds
    assert played == pytest.approx(found.seconds - found.head, rel=1e-3)


def test_servers_have_no_parameters_and_bytes_are_counted():
    found = served(TWO, PAIR)
    costs = Costs(PAIR, MODEL)
    assert found.memory[0] > costs.parameter_bytes(1) > found.memory[1] > 0
    pool = RecordedPool(None, 0, 1, 1, [])
    attn = seqpar.DisaggregatedAttention(pool, tasks=4)
    sent = 0
    for layout in (Layout.contiguous(2048, 1),) * 2:
        shapes = (2048, 8, 64), (2048, 4, 64), (2048, 4, 64)
        q, k, v = (torch.empty(x, dtype=torch.bfloat16, device="meta") for x in shapes)
        sent += sum(x.bytes for x in attn.traffic(q, k, v, layout, causal=True))
    assert found.bytes[0] == len(MODEL.layers) * sent and found.bytes[1] > 0


def test_tensors_of_gpus_go_through_both_hosts():
    slow = dataclasses.replace(FREE, host=Link(0.0, 1e8))
    free, copied = served(ONE, tasks=1), served(ONE, slow, tasks=1)
    moved = free.bytes.sum() / 1e8
    assert copied.seconds - free.seconds == pytest.approx(2 * moved, rel=0.05)


def test_parameters_are_sharded_over_trainers():
    layout = ways.on_trainers(np.array([512, 512, 512]), 3).layout
    plain, sharded = (served(layout, CLUSTER, sharding=x) for x in ("none", "full"))
    assert (plain.memory == sharded.memory).all() and plain.memory.shape == (4,)
    assert sharded.seconds >= plain.seconds
    ((outcome, _),) = sharded.layers.values()
    peers = {x.peers for x in outcome.trace.events if x.what == "parameters"}
    assert peers == {(1, 2), (0, 2), (0, 1)}


REFUSED = [
    (("ring", ONE), {}, "strategy must be 'disaggregated' with servers"),
    (("disaggregated", Layout.zigzag(64, 1)), {"servers": 4}, "layout must have at most"),
    (("disaggregated", Layout.contiguous([0, 5, 8], 2)), {}, "layout must have whole documents"),
    (("disaggregated", ONE), {"mesh": (1, 1)}, "mesh must be None with servers"),
    (("disaggregated", ONE), {"offload": 0.5}, "offload must be 0.0 with servers"),
    (("disaggregated", ONE), {"checkpointing": "full"}, "checkpointing must be"),
    (("disaggregated", ONE), {"servers": -1}, "servers"),
    (("disaggregated", ONE), {"servers": 1.5}, "servers"),
    (("disaggregated", ONE), {"tasks": 0}, "tasks"),
]


@pytest.mark.parametrize(("arguments", "options", "message"), REFUSED)
def test_contradictions_are_named(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        simulate.step(*arguments, PAIR, MODEL, **{"servers": 1, **options})


def test_documents_are_dealt_whole_in_two_nano_batches():
    lengths = np.array([700, 0, 300, 300, 300, 900, 50])
    name, layout, documents = ways.on_trainers(lengths, 3)
    assert name == "whole" and documents == tuple(range(7))
    assert max(layout.tokens_per_rank) <= 1.2 * lengths.sum() / 3
    dealt = nano_batches(layout)
    assert sorted(i for batches in dealt for x in batches for i in x) == [0, 2, 3, 4, 5, 6]
    assert all(1 <= len(batches) <= 2 and all(batches) for batches in dealt)


LENGTHS = [900, 800, 700, 700, 300, 90, 50, 0, 10]


def test_servers_are_ranked_with_their_reasons(quick):
    found = seqpar.recommend(MODEL, CLUSTER, LENGTHS)
    of_servers = [x for x in found if x.servers]
    assert of_servers and {x.strategy for x in of_servers} == {"disaggregated"}
    for x in of_servers:
        assert x.layout.ranks + x.servers == CLUSTER.ranks and x.layout_name == "whole"
        assert x.name == f"disaggregated {x.layout.ranks}+{x.servers} servers, whole"
        again = simulate.step(
            *(x.strategy, x.layout, CLUSTER, MODEL), sharding="full", optimizer=True, **x.options
        )
        taken = again.seconds, again.memory.max(), again.bytes.max()
        assert taken == (x.seconds, x.memory, x.bytes)
        assert x.limit and x.longest > 0
    assert all(x.why_not for x in found[1:])
    assert str(found).count("servers, whole") == len(of_servers)


def test_the_number_of_servers_follows_attentions_share():
    narrow = dataclasses.replace(MODEL, layers=MODEL.layers * 8, vocabulary=10)
    for lengths, most in ((np.full(8, 64), 2), (np.full(64, 200_000), 7)):
        found = ways.numbers_of_servers(lengths, Costs(Cluster.preset("1x8-h100"), narrow))
        assert found == sorted(set(found)) and found[0] >= 1 and found[-1] <= 7
        assert len(found) <= 2 and (found[-1] >= 6) == (most == 7)
    assert ways.numbers_of_servers(np.array([5]), Costs(CLUSTER, MODEL)) == [3]
    assert ways.numbers_of_servers(np.array([5]), Costs(Cluster.preset("1x1-h100"), MODEL)) == []


def test_trainers_of_servers_recompute_what_does_not_fit(quick):
    whole = served(TWO, sharding="full", optimizer=True).memory[0]
    tight = dataclasses.replace(PAIR.device, memory=0.8 * whole)
    found = seqpar.recommend(MODEL, dataclasses.replace(PAIR, device=tight), [2048, 2048])
    (way,) = (x for x in found if x.servers)
    assert way.checkpointing == "attention" and not way.offload and way.memory <= 0.8 * whole
    assert "seqpar.checkpoint(block" in way.code
    none = dataclasses.replace(PAIR.device, memory=1e6)
    found = seqpar.recommend(MODEL, dataclasses.replace(PAIR, device=none), [2048, 2048])
    (way,) = (x for x in found if x.servers)
    assert way.seconds == np.inf and "GB too much" in way.why_not


def test_the_code_of_servers_runs_on_each_trainer(monkeypatch, quick):
    found = seqpar.recommend(MODEL, CLUSTER, LENGTHS)
    way, connected = next(x for x in found if x.servers), []

    def connect(address, **options):
        connected.append((address, options))
        return RecordedPool(None, 0, 1, 1, [])

    monkeypatch.setattr(seqpar.ServerPool, "connect", connect)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    held = []
    for rank in range(way.layout.ranks):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        names = {}
        exec(way.code, names)
        assert f"tasks={way.options['tasks']}, " in repr(names["attn"])
        assert sum(x.tokens for x in names["layouts"]) == way.layout.tokens_per_rank[rank]
        held += [i for batch in names["documents"] for i in batch]
    assert sorted(held) == [i for i, n in enumerate(LENGTHS) if n]
    address, options = connected[0]
    assert address.startswith("file:///") and options == {"home_depth": 0}


def test_the_command_prints_servers(capsys, tmp_path, quick):
    model = tmp_path / "model.json"
    model.write_text(json.dumps(SMALL))
    words = ["plan", "--model", str(model), "--cluster", "1x2-h100", "--lengths", "64,64", "--json"]
    assert main(words) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"servers": 1, "tasks": 4} in [x["options"] for x in rows]


HYBRID = Model.from_config(
    SMALL
    | {"model_type": "qwen3_next", "full_attention_interval": 2}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
)


@pytest.mark.parametrize(
    ("link", "transport"), [(Link(0.0, 1e7), "scan"), (Link(1e-3, 1e15), "all_gather")]
)
def test_linear_layers_get_the_transport_that_is_fastest(link, transport, quick):
    """Scan sends least, in most steps."""
    cluster = dataclasses.replace(CLUSTER, inside=link)
    found = seqpar.recommend(HYBRID, cluster, [600, 424])
    in_place = [x for x in found if not x.servers]
    chosen = {x.options["transport"] for x in in_place if x.layout_name == "contiguous"}
    assert chosen == {transport}
    best = in_place[0]
    assert best.recurrence == "gated_delta" and best.name.endswith(best.options["transport"])
    made = f'(dist.group.WORLD, "gated_delta", "{best.options["transport"]}")'
    assert f"seqpar.RecurrentAttention{made}" in best.code
    (with_servers, *_) = (x for x in found if x.servers)
    assert 'seqpar.RecurrentAttention(alone, "gated_delta")' in with_servers.code
    assert "transport" not in with_servers.options


@few_rows()
@pytest.mark.parametrize("kind", ["linear", "constant_decay", "vector_decay", "kda"])
@pytest.mark.parametrize("transport", ["all_gather", "scan", "tree"])
def test_each_recurrence_is_simulated_through_each_transport(kind, transport):
    recurrence = dataclasses.replace(HYBRID.recurrence, kind=kind)
    model = dataclasses.replace(HYBRID, layers=HYBRID.layers[:1], recurrence=recurrence)
    layout = Layout.contiguous([0, 500, 1024], 4)
    found = simulate.step("ring", layout, CLUSTER, model, transport=transport)
    assert found.seconds > 0 and found.bytes.max() > 0
    with pytest.raises(ValueError, match="transport must be one of"):
        simulate.step("ring", layout, CLUSTER, model, transport="ring")
    with pytest.raises(ValueError, match="kind must be one of"):
        dataclasses.replace(recurrence, kind="other")

"""Steps of models, and what is recommended."""

import dataclasses
import itertools
import signal

import numpy as np
import pytest

import seqpar
from seqpar import Layout, simulate
from seqpar.balance import Cluster, Costs, Link, Model
from seqpar.costs.fit import describe
from seqpar.simulate import error_model
from seqpar.simulate.candidates import Candidate
from seqpar.simulate.error_model import error_of
from seqpar.simulate.recommendations import predicting, searching, ways
from seqpar.simulate.recommendations.searching import lower_bounds
from tests.support.synthetic_device import made_profile

CLUSTER, PAIR = Cluster.preset("1x4-h100"), Cluster.preset("1x2-h100")
SLOW = dataclasses.replace(CLUSTER, inside=Link(0.0, 1e9))
SMALL = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1024,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}
MODEL = Model.from_config(SMALL)
LAYOUT = Layout.zigzag([0, 3000, 8192], 4)


def test_a_step_has_attention_and_all_matrix_products():
    alone = Layout.contiguous(4096, 1)
    found = simulate.step("ring", alone, CLUSTER, MODEL)
    costs = Costs(CLUSTER, MODEL)
    expected = sum(
        costs.span_seconds(0, 4096, backward=way)[0] + costs.tokenwise(4096, way)
        for way in (False, True)
    )
    assert found.seconds == pytest.approx(expected, rel=0.1)  # and what else attention does
    assert found.seconds > expected and found.bytes.tolist() == [0]


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_a_step_is_its_layers_and_the_head(strategy):
    found = simulate.step(strategy, LAYOUT, CLUSTER, MODEL)
    ((outcome, layers),) = found.layers.values()
    assert layers == 4
    assert found.seconds == 4 * outcome.seconds + found.head
    assert found.bytes.tolist() == (4 * outcome.sent_bytes).tolist()
    assert (found.spent("busy") <= found.seconds).all()


def test_checkpointing_takes_time_and_gives_memory():
    plain, attention, full = (
        simulate.step("ring", LAYOUT, CLUSTER, MODEL, checkpointing=x)
        for x in ("none", "attention", "full")
    )
    assert plain.seconds < attention.seconds < full.seconds
    assert (plain.memory > attention.memory).all() and (attention.memory > full.memory).all()
    assert (plain.bytes == attention.bytes).all() and (attention.bytes < full.bytes).all()


def test_sharded_parameters_travel_beside_the_layer():
    """All ranks send all others their part of a layer three times."""
    for cluster in (CLUSTER, SLOW):
        plain, sharded = (
            simulate.step("ring", LAYOUT, cluster, MODEL, sharding=x) for x in ("none", "full")
        )
        assert (plain.bytes == sharded.bytes).all() and (plain.memory == sharded.memory).all()
        layer = MODEL.layers[0]
        weights = MODEL.attention_weights(layer) + MODEL.ffn_weights(layer)
        ((outcome, _),) = sharded.layers.values()
        moved = 3 * 3 * weights * 2 // 4
        assert outcome.seconds >= moved / cluster.inside.rate
        alone = 4 * (moved / cluster.inside.rate + 3 * cluster.inside.latency)
        assert plain.seconds <= sharded.seconds <= (1 + 1e-6) * (plain.seconds + alone)
        sent = outcome.sent_bytes - plain.layers["softmax", None][0].sent_bytes
        assert sent == pytest.approx(moved, rel=1e-3)


def test_gradients_alone_are_reduced_in_two_passes():
    """On links where nothing else counts; all ranks then have all parameters."""
    slow = dataclasses.replace(CLUSTER, inside=Link(0.0, 1e6))
    alone = Layout.from_spans([[(i, 0, 64)] for i in range(4)], [0, 64, 128, 192, 256])
    plain, reduced = (
        simulate.step("ring", alone, slow, MODEL, sharding=x) for x in ("none", "gradients")
    )
    layer = MODEL.layers[0]
    weights = MODEL.attention_weights(layer) + MODEL.ffn_weights(layer)
    ((outcome, _),) = reduced.layers.values()
    assert outcome.seconds == pytest.approx(2 * 3 * weights * 2 / 4 / 1e6, rel=1e-3)
    costs = Costs(slow, MODEL)
    assert (reduced.held.fixed == costs.parameter_bytes(4, stage=0)).all()
    assert (reduced.memory > plain.memory).all()


@pytest.mark.parametrize(("sharding", "part"), [("none", 4), ("full", 4), ("gradients", 1)])
def test_adam_takes_its_bytes_over_the_bandwidth(sharding, part):
    """In bf16: 2 of the gradient, 8 and 8 of the moments, 4 and 4 of the copy, 2 written."""
    plain, updated = (
        simulate.step("ring", LAYOUT, CLUSTER, MODEL, sharding=sharding, optimizer=x)
        for x in (False, True)
    )
    expected = MODEL.parameters / part * 28 / CLUSTER.device.memory_bandwidth
    assert updated.optimizer == pytest.approx(expected, rel=1e-5) and plain.optimizer == 0
    assert updated.seconds == plain.seconds + updated.optimizer


def test_offload_copies_overlap_forward_and_backward():
    layout = Layout.zigzag(8192, 2)
    plain = simulate.step("ring", layout, PAIR, MODEL)
    kept = float(Costs(PAIR, MODEL).kept_bytes(4096)) / len(MODEL.layers)
    for share in (0.5, 1.0):
        for rate in (1e15, 1e6):
            on = dataclasses.replace(PAIR, host=Link(0.0, rate))
            found = simulate.step("ring", layout, on, MODEL, offload=share)
            ((outcome, _),) = found.layers.values()
            if rate == 1e15:
                assert found.seconds == plain.seconds
            else:
                assert outcome.seconds == pytest.approx(2 * share * kept / rate, rel=1e-6)
            assert (outcome.sent_bytes == plain.layers["softmax", None][0].sent_bytes).all()
            copies = [x for x in outcome.trace.events if x.what == "offload"]
            assert len(copies) == 4 and {x.bytes for x in copies} == {int(share * kept)}


def test_copies_of_cores_take_the_core():
    cores = dataclasses.replace(PAIR, overlaps=False, host=Link(0.0, 1e6))
    layout = Layout.zigzag(2048, 2)
    plain, copied = (
        simulate.step("ring", layout, cores, MODEL, offload=x).layers["softmax", None][0].seconds
        for x in (0.0, 1.0)
    )
    kept = float(Costs(cores, MODEL).kept_bytes(1024)) / len(MODEL.layers)
    assert copied == pytest.approx(plain + 2 * kept / 1e6, rel=0.05)


def test_layers_of_a_hybrid_are_simulated_apart():
    hybrid = Model.preset("qwen3-next-80b")
    found = simulate.step("ring", LAYOUT, Cluster.preset("1x4-h200"), hybrid)
    assert {key: n for key, (_, n) in found.layers.items()} == {
        ("linear", None): 36,
        ("softmax", None): 12,
    }
    layers = sum(n * x.seconds for x, n in found.layers.values())
    assert found.seconds == pytest.approx(layers + found.head)


REFUSED = [
    (("rings", LAYOUT, CLUSTER, MODEL), {}, ValueError, "strategy must be one of"),
    (("ring", 5, CLUSTER, MODEL), {}, TypeError, "layout must be a Layout"),
    (("ring", LAYOUT, "1x4", MODEL), {}, ValueError, 'cluster: preset must be like "4x8-h100"'),
    (("ring", LAYOUT, CLUSTER, "llama"), {}, ValueError, "model: preset must be one of llama-3b"),
    (("ring", Layout.zigzag(64, 8), CLUSTER, MODEL), {}, ValueError, "layout must have at most"),
    (("ring", LAYOUT, CLUSTER, MODEL), {"checkpointing": "some"}, ValueError, "checkpointing"),
    (("ring", LAYOUT, CLUSTER, MODEL), {"sharding": "some"}, ValueError, "sharding must be one"),
    (("ring", LAYOUT, CLUSTER, MODEL), {"offload": 1.5}, ValueError, "offload must be between"),
    (("ring", LAYOUT, CLUSTER, MODEL), {"optimizer": "adam"}, ValueError, "optimizer"),
    (("usp", LAYOUT, CLUSTER, MODEL), {}, ValueError, "mesh must have 2 dimensions"),
    (("ring", LAYOUT, CLUSTER, MODEL), {"partial_dtype": "x"}, TypeError, "not an option"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "options", "error", "message"), REFUSED)
def test_wrong_arguments_are_named(arguments, options, error, message):
    with pytest.raises(error, match=message):
        simulate.step(*arguments, **options)


def test_recommendations_are_ranked_and_say_why():
    found = seqpar.recommend(MODEL, CLUSTER, [3000, 5192], simulate_all=True)
    seconds = [x.seconds for x in found]
    assert seconds == sorted(seconds) and np.isfinite(seconds).all()
    assert {x.strategy for x in found} == {*seqpar.strategies.registry.SOFTMAX}
    assert found[0].why_not is None and all(
        "% slower: " in x.why_not or x.why_not == "as fast" for x in found[1:]
    )
    assert {x.limit for x in found} <= {"compute", "imbalance", "communication"}
    best = found[0]
    options = best.options | {"sharding": "full", "optimizer": True}
    again = simulate.step(best.strategy, best.layout, CLUSTER, MODEL, **options)
    assert again.seconds == best.seconds and best.bytes == again.bytes.max()
    lines = str(found).splitlines()
    assert len(lines) == len(found) + 1 and lines[1].startswith(best.name)
    assert all(x.error == error_of(CLUSTER) > 0 for x in found)
    assert f"±{best.error:.0%}" in lines[1] and f"{best.longest:,}" in lines[1]


@pytest.mark.exhaustive
def test_only_slower_ways_are_excluded():
    """In long documents most time is computation, which contiguous cuts divide unevenly."""
    complete, found = (
        seqpar.recommend(MODEL, CLUSTER, [30000, 2768], simulate_all=x) for x in (True, False)
    )
    simulated = {x.name: x for x in complete}
    assert {x.name for x in found} == {*simulated} and not any(x.excluded for x in complete)
    excluded = [x for x in found if x.excluded]
    assert any(x.name == "ring, contiguous" for x in excluded)
    for x in excluded:
        assert found[0].seconds * (1 + x.error) < x.seconds <= simulated[x.name].seconds
        assert x.step is None and x.why_not.startswith("not simulated: at best ")
    kept = [x for x in found if not x.excluded]
    assert {x.name: x.seconds for x in kept} == {x.name: simulated[x.name].seconds for x in kept}
    assert found.index(kept[-1]) == len(kept) - 1  # excluded ways come after simulated ones
    assert f"≥ {excluded[0].seconds:.4g} " in str(found)


def test_a_way_is_excluded_by_its_first_bound(monkeypatch):
    yielded = {}

    def counted(way, costs):
        yielded[way.name] = bounds = []
        for bound in lower_bounds(way, costs):
            bounds.append(bound)
            yield bound

    monkeypatch.setattr(searching, "lower_bounds", counted)
    found = seqpar.recommend(MODEL, CLUSTER, [30000, 2768])
    assert all(bounds == sorted(bounds) for bounds in yielded.values())
    counts = {x.name: len(yielded[x.name]) for x in found if not x.servers}
    simulated = {x.name for x in found if not x.excluded and not x.servers}
    assert {counts[name] for name in simulated} == {2}
    assert 1 in counts.values()
    slowest = max((x for x in found if x.excluded), key=lambda x: x.seconds)
    assert slowest.seconds == yielded[slowest.name][-1]


@pytest.mark.usefixtures("_python_handles_interrupts")
def test_an_interrupt_before_simulations_gives_one(monkeypatch):
    pressed = iter([True])

    def interrupted(*arguments):
        if next(pressed, False):
            signal.raise_signal(signal.SIGINT)
        return lower_bounds(*arguments)

    monkeypatch.setattr(searching, "lower_bounds", interrupted)
    found = seqpar.recommend(MODEL, PAIR, [300])
    assert found.partial and found[0].seconds < np.inf
    assert {x.why_not for x in found[1:]} == {"not simulated: interrupted"}


def test_steps_on_cores_use_gloo_and_cpus():
    cores = dataclasses.replace(CLUSTER, overlaps=False)
    found = seqpar.recommend(MODEL, cores, [2048], simulate_all=True)
    usp = next(x for x in found if x.name == "usp 2x2, zigzag")
    assert 'init_device_mesh("cpu", (2, 2))' in usp.code
    found = seqpar.recommend(MODEL, CLUSTER, [2048], simulate_all=True)
    on_gpus = next(x for x in found if x.name == usp.name)
    assert 'init_device_mesh("cuda", (2, 2))' in on_gpus.code
    assert usp.seconds > on_gpus.seconds  # messages take what computes


def test_a_lack_of_memory_is_quantified():
    tight = dataclasses.replace(CLUSTER.device, memory=1e6)
    found = seqpar.recommend(MODEL, dataclasses.replace(PAIR, device=tight), [300, 519])
    assert {x.limit for x in found} == {"memory"} and {x.seconds for x in found} == {np.inf}
    assert all("needs " in x.why_not and "GB too much" in x.why_not for x in found)
    assert [x.memory for x in found[1:]] == sorted(x.memory for x in found[1:])


@pytest.mark.parametrize(("rate", "keeping"), [(1e15, "offload"), (1e3, "checkpoint attention")])
def test_offload_sharding_or_recomputing_make_it_fit(rate, keeping):
    layout = Layout.zigzag(8192, 2)
    plain = simulate.step("ring", layout, PAIR, MODEL, sharding="full", optimizer=True)
    capacity = 0.9 * plain.memory.max()
    tight = dataclasses.replace(CLUSTER.device, memory=capacity)
    host = Link(0.0, rate)
    found = seqpar.recommend(MODEL, dataclasses.replace(PAIR, device=tight, host=host), [8192])
    ring = next(x for x in found if x.name == "ring, zigzag")
    assert ring.keeping.startswith(keeping) and ring.memory <= capacity
    assert ("seqpar.offload(0." if ring.offload else "seqpar.checkpoint(block") in ring.code
    assert ring.longest >= 8192
    if ring.offload:  # which hides
        assert ring.seconds == plain.seconds


@pytest.mark.parametrize("scale", [pytest.param(0.5, marks=pytest.mark.exhaustive), 2.0])
def test_the_longest_batch_is_what_fits(monkeypatch, scale):
    monkeypatch.setattr(ways, "candidates", lambda *_: [Candidate("ulysses")])
    best = seqpar.recommend(MODEL, CLUSTER, [3000, 5192])[0]
    capacity = CLUSTER.device.memory / 1e4  # lengths of a size that is quick to simulate
    small = dataclasses.replace(CLUSTER.device, memory=max(capacity, scale * best.memory))
    cluster = dataclasses.replace(CLUSTER, device=small, host=Link(0.0, 1e3))
    every = seqpar.recommend(MODEL, cluster, [3000, 5192], simulate_all=True)
    found = next(x for x in every if x.layout_name == "zigzag")
    n = found.longest
    lengths = [n * 3000 // 8192, n - n * 3000 // 8192]
    again = simulate.step(
        found.strategy,
        getattr(Layout, found.layout_name)(np.r_[0, np.cumsum(lengths)], 4),
        cluster,
        MODEL,
        checkpointing=found.checkpointing,
        **found.options,
    )
    assert again.memory.max() == pytest.approx(small.memory, rel=0.02)


def test_planned_layouts_are_candidates_in_the_plans_order():
    lengths = [6000, 500, 400, 300, 200, 100, 500, 192]
    found = seqpar.recommend(MODEL, CLUSTER, lengths)
    planned = [x for x in found if x.layout_name not in ("zigzag", "contiguous")]
    assert planned and all(sorted(x.documents) == list(range(8)) for x in planned)
    one = planned[0]
    assert [lengths[i] for i in one.documents] == np.diff(one.layout.cu_seqlens).tolist()
    with_one_rank = seqpar.recommend(MODEL, Cluster.preset("1x1-h100"), [5])
    assert {x.layout_name for x in with_one_rank} <= {"zigzag", "contiguous"}


def test_errors_add_those_of_steps_and_prices(monkeypatch):
    here = Cluster(**describe(made_profile(0.05)))
    steps = error_model.validated()
    assert set(steps) == {"cores", "links"} and all(0 < x < 1 for x in steps.values())
    assert error_of(CLUSTER) == steps["links"]
    assert steps["cores"] < error_of(here) < steps["cores"] + 0.2
    for samples in (3, [1.5], [{"kind": "causal"}]):
        damaged = dataclasses.replace(here, measured={"samples": samples})
        with pytest.raises(ValueError, match=r"^cluster\.measured has samples"):
            error_of(damaged)


def test_what_a_strategy_cannot_is_its_reason(monkeypatch):
    def refuse(strategy, *arguments, **options):
        if strategy == "ring":
            raise ValueError("not today")
        return simulate.step(strategy, *arguments, **options)

    monkeypatch.setattr(predicting, "step", refuse)
    found = seqpar.recommend(MODEL, Cluster.preset("1x1-h100"), [0, 1])
    refused = {x.strategy: x.why_not for x in found if x.seconds == np.inf}
    assert refused == {"ring": "not today"}
    assert "not today" in str(found)


@pytest.fixture
def _python_handles_interrupts():
    """As in a program of the user; a worker of pytest may ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_after(monkeypatch, steps, times=1):
    """Press Ctrl-C during the step after this number of steps."""
    counted = itertools.count()

    def interrupted(*arguments, **options):
        if next(counted) == steps:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return simulate.step(*arguments, **options)

    monkeypatch.setattr(predicting, "step", interrupted)


@pytest.mark.usefixtures("_python_handles_interrupts")
@pytest.mark.parametrize(("times", "simulated"), [(1, 4), (2, 3)])
def test_an_interrupt_gives_the_best_way_yet(monkeypatch, caplog, times, simulated):
    """The first Ctrl-C ends the simulations after the current way, a second one immediately."""
    complete = seqpar.recommend(MODEL, PAIR, [300], simulate_all=True)
    assert not complete.partial
    interrupt_after(monkeypatch, 3, times)
    partial = seqpar.recommend(MODEL, PAIR, [300], simulate_all=True)
    assert partial.partial and {x.name for x in partial} == {x.name for x in complete}
    seconds = {x.name: x.seconds for x in complete}
    known = partial[:simulated]
    assert [x.seconds for x in known] == sorted(seconds[x.name] for x in known)
    assert {x.why_not for x in partial[simulated:]} == {"not simulated: interrupted"}
    assert {x.seconds for x in partial[simulated:]} == {np.inf}
    *_, last = str(partial).splitlines()
    assert f"{simulated} of {len(complete)} ways" in last
    assert len(str(partial).splitlines()) == simulated + 2
    assert "recommend stops after the current step" in caplog.text
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((MODEL, CLUSTER, []), ValueError, "lengths"),
        ((MODEL, CLUSTER, [0]), ValueError, "lengths must have at least one token"),
        ((MODEL, CLUSTER, [-1]), ValueError, "lengths"),
        ((None, CLUSTER, [5]), TypeError, "model must be a Model or the name of a preset"),
        ((MODEL, 4, [5]), TypeError, "cluster must be a Cluster or the name of a preset"),
    ],
)
def test_wrong_arguments_of_recommend_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        seqpar.recommend(*arguments)

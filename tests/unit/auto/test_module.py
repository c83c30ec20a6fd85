"""`make_attention("auto", group)`: which strategy it chooses, without ranks."""

import copy
from dataclasses import replace

import pytest
import torch

import seqpar
from seqpar import Layout, Mask, simulate
from seqpar.attention.operands import OperandShape
from seqpar.auto import choosing, measuring
from seqpar.auto.choosing import CandidatePrediction, Choice
from seqpar.balance import Cluster
from seqpar.comm.messages.comm import Comm
from seqpar.core.hooks import set_hooks
from seqpar.simulate.candidates import STRATEGIES, Candidate, candidates
from seqpar.strategies.registry import SOFTMAX

NODE, NODES = Cluster.preset("1x4-h100"), Cluster.preset("2x2-h100")
DISTANT = replace(NODES, between=replace(NODES.between, rate=1e9))


def made(ranks=4, rank=0, cluster=NODE, **options):
    """The module on a rank that is not there: choosing needs no group."""
    return seqpar.make_attention("auto", Comm("none", rank, ranks), cluster=cluster, **options)


def operands(layout, rank=0, heads=(8, 4), dim=64):
    """q, k and v of a rank, without data."""
    n, dtype = layout.tokens_on(rank), torch.bfloat16
    q, k = (torch.empty(n, h, dim, dtype=dtype, device="meta") for h in heads)
    return q, k, k


def chosen(layout, attn, rank=0, heads=(8, 4), **call):
    """What is chosen for a causal call."""
    module = attn.chosen(*operands(layout, rank, heads), layout, **({"causal": True} | call))
    assert module.strategy.name == attn.choice.strategy
    return str(attn.choice.candidate)


def test_all_strategies_are_candidates_with_all_meshes():
    assert set(STRATEGIES) == set(SOFTMAX)
    names = [str(x) for x in candidates(Cluster.preset("2x4-h100"), 8)]
    meshes = ["mesh 4x2", "mesh 2x4", "usp 4x2", "usp 2x4"]
    assert names == [*STRATEGIES[:-2], *meshes]
    wide = candidates(Cluster.preset("2x8-h100"), 16, ["mesh"])
    assert [x.mesh for x in wide] == [(8, 2), (4, 4)]
    assert [str(x) for x in candidates(Cluster.preset("1x1-h100"), 1, ["usp", "ring"])] == ["ring"]


def test_the_simulated_fastest_is_chosen_and_losers_explained():
    layout = Layout.zigzag([0, 3000, 8192], 4)
    attn = made()
    name, ranked = chosen(layout, attn), attn.choice.ranked
    seconds = [x.seconds for x in ranked]
    assert name == str(ranked[0].candidate) and seconds == sorted(seconds)
    assert len(ranked) == len(candidates(NODE, 4)) and ranked[0].why_not == ""
    assert all("% slower: " in x.why_not or x.why_not == "as fast" for x in ranked[1:])
    assert {x.limit for x in ranked} <= {"compute", "imbalance", "communication"}
    table = str(attn.choice)
    assert table.startswith("on 1x4-h100:\nstrategy") and f"chosen={name}" in repr(attn)


def test_choice_depends_on_cluster_mask_and_heads():
    layout, attn = Layout.contiguous(16384, 4), made(cluster=DISTANT)
    assert chosen(layout, attn, heads=(8, 8)) == "ulysses"
    assert chosen(layout, attn, heads=(8, 1)) == "mesh 2x2"
    assert chosen(layout, attn, heads=(8, 8), window_size=(255, 0)) == "usp 2x2"
    short = Layout.from_spans([[(i, 0, 512)] for i in range(4)], [0, 512, 1024, 1536, 2048])
    assert chosen(short, attn) == "ring"  # nothing moves
    assert attn.choice.ranked[1].why_not == "as fast"


@pytest.mark.parametrize(
    "call",
    [
        pytest.param({}, id="dense"),
        pytest.param({"window_size": (255, 0)}, id="window", marks=pytest.mark.exhaustive),
    ],
)
def test_four_ranks_give_the_choice_of_all(call, monkeypatch):
    layout, shape = Layout.zigzag(16384, 8), OperandShape(torch.bfloat16, 1, 8, 4, 64, 64)
    cluster = replace(Cluster.preset("2x4-h100"), between=DISTANT.between)
    arguments = cluster, candidates(cluster, 8), shape, layout
    every = simulate.choose(*arguments, causal=True, **call)
    monkeypatch.setattr(choosing, "MAX_SIMULATED_RANKS", 7)
    some = simulate.choose(*arguments, causal=True, **call)
    assert some.candidate == every.candidate
    assert some.seconds == pytest.approx(every.seconds, rel=0.05)


def test_512_ranks_with_windows_exchange_keys():
    layout = Layout.zigzag(512 * 4096, 512)
    cluster = Cluster.preset("64x8-h100")
    attn = made(512, cluster=cluster, strategies=["ulysses", "all_gather"])
    assert chosen(layout, attn, window_size=(4095, 0)) == "all_gather"
    assert attn.choice.ranked[1].why_not.endswith("slower")


def test_candidates_beyond_memory_are_impossible_on_many_ranks():
    device = replace(NODE.device, memory=1e7)
    cluster = replace(Cluster.preset("32x8-h100"), device=device)
    attn = made(256, cluster=cluster, strategies=["all_gather", "ring"])
    assert chosen(Layout.zigzag(256 * 512, 256), attn) == "ring"
    assert attn.choice.ranked[1].why_not.startswith("a rank's new tensors need")


def test_all_ranks_choose_alike():
    layout = Layout.from_spans(
        [[(0, 0, 700)], [(0, 700, 4000)], [], [(1, 0, 900)]], [0, 4000, 4900]
    )
    attn = [made(rank=rank, cluster=DISTANT) for rank in range(4)]
    assert len({chosen(layout, x, rank) for rank, x in enumerate(attn)}) == 1
    assert len({x.choice for x in attn}) == 1


def test_candidates_within_2_8_errors_are_close():
    ranked = [CandidatePrediction(Candidate(name), x) for name, x in (
        ("ring", 1.0), ("ulysses", 1.28), ("all_gather", 1.29), ("token_ring", torch.inf),
    )]  # fmt: skip
    choice = Choice(tuple(ranked), "here")
    assert [x.strategy for x in measuring.close(choice, 0.1)] == ["ring", "ulysses"]
    assert [x.strategy for x in measuring.close(choice, 0.0)] == ["ring"]
    alone = measuring.measured(choice, 0.05, None, None, (), None, True)
    assert alone is choice  # nothing to tell apart, and nothing is asked of the ranks


def test_short_calls_measure_many_candidates_in_a_second():
    """Six times each: 0.06, 0.12 and 0.6 s, and then 1.8."""
    ranked = [CandidatePrediction(Candidate(name), x) for name, x in (
        ("ring", 0.01), ("ulysses", 0.02), ("all_gather", 0.1), ("token_ring", 0.3),
    )]  # fmt: skip
    found = measuring.close(Choice(tuple(ranked), "here"), 0.0)
    assert [x.strategy for x in found] == ["ring", "ulysses", "all_gather"]


def test_a_call_that_is_replaced_is_not_measured():
    q = torch.zeros(2)
    assert measuring.can_be_measured(q) and not measuring.can_be_measured(q.to("meta"))
    for replaced in ({"skip_messages": True}, {"replace_compute": lambda area: None}):
        with set_hooks(**replaced):
            assert not measuring.can_be_measured(q)


def test_with_once_the_first_choice_holds():
    attn = made(once=True, cluster=DISTANT)
    first = Layout.contiguous(16384, 4)
    assert chosen(first, attn, heads=(8, 1)) == "mesh 2x2"
    other = Layout.contiguous(64, 4)
    assert attn.chosen(*operands(other), other, causal=True).strategy.name == "mesh"
    refused = attn.unsupported(*operands(other), other, causal=True, window_size=(1, 2, 3))
    assert refused.startswith("window_size")


def test_what_none_can_compute_is_refused_and_named():
    attn, layout = made(), Layout.zigzag(64, 4)
    wrong = [
        ({"causal": True, "window_size": (-5, 0)}, "window_size"),
        ({"causal": 3}, "causal"),
        ({"causal": True, "dropout_p": 0.5}, "dropout_p"),
        ({"causal": True, "mask": Mask.of_ranges([(0, 0, 9, 0, 9, None, 0)])}, "causal"),
        ({}, "causal"),
    ]  # fmt: skip
    for call, name in wrong:
        with pytest.raises((ValueError, TypeError), match=f"^{name}"):
            attn.chosen(*operands(layout), layout, **call)
        assert name in attn.unsupported(*operands(layout), layout, **call)
    with pytest.raises(ValueError, match="layout"):
        attn.chosen(*operands(layout), Layout.zigzag(64, 2), causal=True)
    with pytest.raises(TypeError, match="windows is not an argument"):
        attn.chosen(*operands(layout), layout, causal=True, windows=3)


def test_a_backend_for_gpus_changes_nothing():
    layout, shape = Layout.zigzag(640, 4), OperandShape(torch.bfloat16, 1, 8, 4, 64, 64)
    options = {"causal": True, "backward": False}
    plain = simulate.choose(NODE, candidates(NODE, 4), shape, layout, **options)
    with seqpar.use_backend("triton"):
        assert simulate.choose(NODE, candidates(NODE, 4), shape, layout, **options) == plain


def test_calls_that_all_refuse_list_the_reasons():
    layout, shape = Layout.zigzag(640, 4), OperandShape(torch.bfloat16, 1, 8, 3, 64, 64)
    with pytest.raises(ValueError, match="multiple"):
        simulate.choose(NODE, candidates(NODE, 4), shape, layout, causal=True)


def test_choices_depend_on_gradients_and_other_operands():
    layout, keys = Layout.zigzag([0, 0, 37, 100], 4), Layout.zigzag([0, 5, 60, 200], 4)
    q, (k, _, _) = operands(layout)[0], operands(keys, heads=(4, 4))
    attn = made()
    call = {"kv_layout": keys, "sinks": torch.zeros(8, device="meta"), "softcap": 5.0}
    with torch.inference_mode():
        assert attn.chosen(q, k, k, layout, causal=False, **call) is not None
    q, k = q[None].expand(3, -1, -1, -1), operands(layout)[1][None].expand(3, -1, -1, -1)
    prefix = torch.tensor([0, 3, 4])
    assert attn.chosen(q, k, k, layout, causal=True, prefix_lens=prefix, return_lse=True)


def test_traffic_and_areas_come_from_the_choice():
    layout, call = Layout.zigzag([0, 100, 640], 4), {"causal": True}
    attn = made(strategies=["ring"])
    ring = seqpar.RingAttention(Comm("none", 0, 4))
    for rank in (None, 2):
        found = attn.traffic(*operands(layout), layout, rank=rank, **call)
        assert found == ring.traffic(*operands(layout), layout, rank=rank, **call)
    areas = [x.mask_area(*operands(layout), layout, **call) for x in (attn, ring)]
    assert (areas[0] == areas[1]).all()
    assert attn.unsupported(*operands(layout), layout, **call) is None


def test_one_rank_and_no_tokens():
    one = Layout.contiguous([0, 0, 5], 1)
    alone = made(ranks=1, cluster=Cluster.preset("1x1-h100"))
    assert chosen(one, alone) in STRATEGIES
    nothing = Layout.contiguous(0, 4)
    assert chosen(nothing, made()) in STRATEGIES


def test_a_copy_chooses_alike():
    attn, layout = made(), Layout.zigzag(640, 4)
    assert chosen(layout, copy.deepcopy(attn)) == chosen(layout, attn)


WRONG = [
    ({"cluster": 4}, TypeError, "cluster must be a Cluster or the name of a preset"),
    ({"cluster": "h100"}, ValueError, 'cluster: preset must be like "4x8-h100"'),
    ({"is_causal": True}, TypeError, "is_causal is not an option of 'auto', .* pass causal"),
    ({"ranks": 8}, ValueError, "cluster must be a cluster of at least the group's 8 ranks"),
    ({"strategies": []}, ValueError, "strategies must be some of"),
    ({"strategies": ["rings"]}, ValueError, "strategies must be some of"),
    ({"strategies": ["usp"], "ranks": 1}, ValueError, "strategies must include one for 1 ranks"),
    ({"backward": 1}, ValueError, "backward"),
    ({"once": "yes"}, ValueError, "once"),
    ({"routing": None}, TypeError, "routing is not an option of 'auto', which has cluster, "),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_wrong_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        made(**options)


def test_it_is_not_recorded():
    with pytest.raises(ValueError, match="record a fixed strategy instead"):
        simulate.record(lambda comm: seqpar.make_attention("auto", comm, cluster=NODE), 2)

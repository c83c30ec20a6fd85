"""Every strategy's own code under virtual time."""

import cProfile
import dataclasses

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import seqpar
from seqpar import LASP2Attention, Layout, make_attention, simulate
from seqpar.balance import Cluster
from seqpar.core.torch_private import memory_of
from seqpar.costs.device import Link
from seqpar.simulate.playback.op_costs import price
from seqpar.simulate.recording import operators
from seqpar.simulate.recording.program import (
    Begin,
    Compute,
    End,
    Operators,
    Post,
    SoftmaxCompute,
    Wait,
)
from seqpar.strategies.registry import LINEAR, SOFTMAX
from tests.support.steady import SilentComm
from tests.support.tiers import few_rows

RANKS = 4
CLUSTER = Cluster.preset("2x2-h100")
MESHES = {name for name, attention in SOFTMAX.items() if attention.dimensions == 2}
LAYOUTS = {
    "zigzag": Layout.zigzag([0, 500, 501, 501, 2048], RANKS),
    "uneven": Layout.from_spans(
        [[(0, 0, 300), (1, 0, 20)], [(1, 20, 400)], [], [(0, 300, 512), (1, 400, 512)]],
        [0, 512, 1024],
    ),
}
STRATEGIES = [*SOFTMAX, *(f"lasp2 {transport}" for transport in ("all_gather", "scan"))]


def module(name, comm):
    return LASP2Attention(comm, name.split()[1]) if " " in name else make_attention(name, comm)


def operands(rank, layout):
    shapes = [(layout.tokens_on(rank), heads, 16) for heads in (4, 2, 2)]
    return [torch.empty(x, dtype=torch.bfloat16, device="meta", requires_grad=True) for x in shapes]


def options(name):
    return {} if " " in name else {"causal": True}


def code(name, layout):
    """A rank's step: attention, forward and backward."""

    def step(comm):
        out = module(name, comm)(*operands(comm.rank, layout), layout, **options(name))
        out.backward(torch.empty_like(out))

    return step


def recorded(name, layout, **how):
    mesh = (2, 2) if name in MESHES else None
    return simulate.record(code(name, layout), layout.ranks, mesh=mesh, **how)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_layout_recorded_again_gives_equal_programs(name):
    """Though indices are kept with it."""
    layout = Layout.zigzag([0, 500, 501, 501, 2048], RANKS)
    first, again = (recorded(name, layout) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert one.peak_bytes == other.peak_bytes
        works = [[x.work for x in each.actions if isinstance(x, Compute)] for each in (one, other)]
        of_operators = [[x for x in each if isinstance(x, Operators)] for each in works]
        assert of_operators[0] == of_operators[1]


def contents(program):
    """The program's peak and its actions, in a form that can be compared."""
    actions = []
    for x in program.actions:
        if isinstance(x, Begin):
            actions.append(contents(x.program))
        elif isinstance(x, Compute):
            work = x.work
            if isinstance(work, SoftmaxCompute):
                columns = "rows", "keys", "pairs", "windowed"
                work = *(getattr(work.tasks, x).tolist() for x in columns), *work[1:]
            actions.append((tuple(work), x.what, x.step, x.area))
        elif not isinstance(x, End):
            actions.append(repr(x))
    return program.peak_bytes, actions


class _KeepsNothing(dict):
    def __setitem__(self, form, known):
        pass


@few_rows()
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_kept_forms_of_results_change_no_program(name, layout, monkeypatch):
    recorded(name, layout)
    kept = recorded(name, layout)
    monkeypatch.setattr(operators, "_known", _KeepsNothing())
    for one, other in zip(kept, recorded(name, layout), strict=True):
        assert contents(one) == contents(other)


def test_results_of_operators_keep_their_memory():
    """A result is a new tensor, the input itself, or a view of it, also when its form is kept."""

    def step(comm):
        x, y = torch.empty(2, 4, 6, device="meta")[:, ::2], torch.empty(4, 6, device="meta")
        for _ in range(3):
            new, out = y + 1, torch.empty(4, 6, device="meta")
            assert y.add_(1) is y and torch.mul(y, 2, out=out) is out
            assert new.shape == y.shape and memory_of(new) not in map(memory_of, (y, out))
            assert memory_of(y.view(6, 4)) == memory_of(y)
            assert memory_of(x.reshape(-1)) != memory_of(x) and y.half().dtype == torch.half
            turned = x.transpose(0, 1)
            assert (turned * 2).stride() == torch.empty_like(turned).stride() != x.stride()
            assert (y * 2).dtype == torch.float32 and (y == 2).dtype == torch.bool
            doubled, other = y.clone(), y.clone()
            assert torch.add(doubled, other, out=doubled) is doubled
            assert torch.add(doubled, other, out=other) is other
            assert (y.long() * 2).dtype == torch.long and (y.long() * 2.0).dtype == torch.float32

    (program,) = simulate.record(step, 1)
    assert program.peak_bytes


@few_rows()
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("ordered", [True, False])
def test_simulated_bytes_and_areas_match_the_strategy(name, layout, ordered):
    programs = recorded(name, layout, ordered=ordered)
    outcome = simulate.play(programs, CLUSTER)
    comm = SilentComm(0, RANKS)
    comm.shape = (2, 2) if name in MESHES else (RANKS,)
    call = module(name, comm), *operands(0, layout), layout
    for rank, sent in enumerate(outcome.sent_bytes):
        rows = call[0].traffic(*call[1:], rank=rank, **options(name))
        assert sent == sum(row.bytes for row in rows)
    if name in SOFTMAX:
        events = [x for x in outcome.trace.events if x.what.endswith("forward") and x.area]
        found = [sum(x.area for x in events if x.rank == rank) for rank in range(RANKS)]
        assert found == call[0].mask_area(*call[1:], **options(name)).sum(1).tolist()


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_same_code_gives_the_same_outcome(name):
    first, second = (simulate.play(recorded(name, LAYOUTS["zigzag"]), CLUSTER) for _ in range(2))
    assert first.trace.events == second.trace.events


def without_links(found):
    return dataclasses.replace(found, inside=Link(0.0, 1e300), between=Link(0.0, 1e300))


@pytest.mark.parametrize("name", STRATEGIES)
def test_unlimited_links_leave_only_the_slowest_ranks_work(name):
    """Ranks are even, but for what torch's operators take: these have no price here."""
    programs = recorded(name, LAYOUTS["zigzag"], operators=False)
    seconds = {id(x): 1.0 for program in programs for x in program.each()}
    outcome = simulate.play(programs, without_links(CLUSTER), pricing=lambda found: seconds)
    computes = [sum(isinstance(x, Compute) for x in program.each()) for program in programs]
    assert max(computes) <= outcome.seconds <= sum(computes)
    if len(set(computes)) == 1 and "disaggregated" not in name and "token" not in name:
        assert outcome.seconds == computes[0]


@pytest.mark.parametrize("name", STRATEGIES)
def test_without_work_a_step_takes_its_messages(name):
    """At 1 byte a second, on one node: no less than the busiest port, and no more than all of
    them one after another."""
    layout = LAYOUTS["zigzag"]
    on = dataclasses.replace(
        CLUSTER, nodes=1, devices_per_node=RANKS, inside=Link(0.0, 1.0), overlaps=True
    )
    nothing = lambda found: {id(x): 0.0 for x in found}  # noqa: E731
    outcome = simulate.play(recorded(name, layout), on, pricing=nothing)
    sent = outcome.sent_bytes
    assert max(sent) * 0.999 <= outcome.seconds <= sum(sent)
    assert outcome.exposure.fraction == pytest.approx(1.0)


def test_what_ring_exposes_is_worked_out_by_hand():
    """Two ranks, full masks, as much to compute over own keys as over the other's. In forward a hop
    hides under the former. In backward it hides under half of that, and gradients, twice as long in
    fp32, under the other half."""
    layout = Layout.contiguous(256, 2)

    def step(comm):
        q, k, v = operands(comm.rank, layout)
        out = make_attention("ring", comm)(q, k, v, layout, causal=False)
        out.backward(torch.empty_like(out))

    programs = simulate.record(step, 2, operators=False)
    hop = 128 * 2 * (16 + 16) * 2  # rows × KV heads × (D + Dv) × bytes of bf16
    sends = [x.sends for x in programs[0].actions if isinstance(x, Post)]
    assert sends == [((1, hop),), ((1, hop),), ((1, 2 * hop),)]
    on = dataclasses.replace(Cluster.preset("1x2-h100"), inside=Link(0.0, 1.0))
    for compute in (hop / 4, 1.5 * hop, 6 * hop):
        second = compute / (128 * 128 * 4)  # of each pair and query head
        pricing = lambda found, second=second: {id(x): x.area * second for x in found}  # noqa: E731
        found = simulate.play(programs, on, pricing=pricing)
        forward = max(compute, hop) + compute
        backward = max(compute / 2, hop) + compute + max(compute / 2, 2 * hop)
        (exposure,) = found.exposure.rounds
        assert exposure == pytest.approx((forward + backward, 4 * compute, 4 * hop))
        share = (forward + backward - 4 * compute) / (4 * hop)
        assert found.exposure.fraction == pytest.approx(share, abs=1e-9)


def test_whole_models_are_recorded_with_products_and_memory():
    layout = LAYOUTS["zigzag"]

    def step(comm):
        tokens = layout.tokens_on(comm.rank)
        project = nn.Linear(64, 128, bias=False, device="meta")
        x = torch.empty(tokens, 64, device="meta")
        q, k, v = project(x).view(tokens, 8, 16).split([4, 2, 2], 1)
        make_attention("ring", comm)(q, k, v, layout, causal=True).sum().backward()
        assert project.weight.grad.shape == (128, 64)

    program = simulate.record(step, RANKS, only=[1])[0]
    works = [x.work for x in program.each() if isinstance(x, Compute)]
    flops = [x.flops for x in works if isinstance(x, Operators) and x.flops]
    tokens = layout.tokens_on(1)
    assert flops == [2 * tokens * 64 * 128] * 2  # x needs no gradient
    assert sum(isinstance(x, SoftmaxCompute) for x in works) >= 2
    held = tokens * (64 + 128) * 4  # x, and q, k and v
    assert held < program.peak_bytes < 20 * held


def test_checkpointing_that_keeps_attention_sends_nothing_again():
    layout = LAYOUTS["zigzag"]

    def step(comm, checkpoint):
        attn = make_attention("ring", comm)
        call = lambda *x: attn(*x, layout, causal=True)  # noqa: E731
        out = checkpoint(call, *operands(comm.rank, layout))
        out.backward(torch.empty_like(out))

    full = lambda f, *x: torch.utils.checkpoint.checkpoint(f, *x, use_reentrant=False)  # noqa: E731
    plain, kept, again = (
        simulate.record(lambda comm, way=way: step(comm, way), RANKS, only=[0])[0].sent_bytes
        for way in (lambda f, *x: f(*x), seqpar.checkpoint, full)
    )
    forward = [x for x in recorded("ring", layout)[0].actions if isinstance(x, Post)]
    forward = sum(n for x in forward if "forward" in x.what for _, n in x.sends)
    assert kept == plain and again == plain + forward


def test_a_scan_runs_beside_the_computation():
    programs = recorded("lasp2 scan", LAYOUTS["zigzag"])
    assert any(isinstance(x, Begin) for x in programs[1].actions)
    assert {*LINEAR} == {"lasp2", "recurrent"}


def test_what_cannot_be_recorded_is_refused():
    layout = LAYOUTS["zigzag"]
    with pytest.raises(ValueError, match="only meta tensors are recorded"):
        simulate.record(lambda comm: comm.all_gather(torch.ones(2), label="digest"), 2)
    with pytest.raises(ValueError, match="mesh must have 4 ranks"):
        simulate.record(code("ring", layout), 4, mesh=(2, 3))
    with pytest.raises(ValueError, match="step must be"):
        simulate.record("ring", 4)
    with pytest.raises(ValueError, match="layout"):
        simulate.record(code("ring", layout), 3)
    with pytest.raises(ValueError, match="ranks must be"):
        simulate.record(code("ring", layout), 0)
    with pytest.raises(ValueError, match="only must be"):
        simulate.record(code("ring", layout), 4, only=[4])
    assert vars(seqpar.core.hooks.hooks)["trace"] is None


def test_a_rank_alone_sends_nothing():
    layout = Layout.zigzag([0, 5, 5, 64], 1)
    for name in STRATEGIES:
        mesh = (1, 1) if name in MESHES else None
        outcome = simulate.play(
            simulate.record(code(name, layout), 1, mesh=mesh), Cluster.preset("1x1-h100")
        )
        assert outcome.sent_bytes.tolist() == [0] and outcome.seconds > 0


@pytest.mark.exhaustive
def test_cost_of_simulating_grows_with_messages():
    """Function calls per message do not grow from 16 to 64 ranks, which send 11 times as many."""

    def calls_per_message(rows):
        ranks = rows * 4
        layout = Layout.zigzag(ranks * 1024, ranks)

        def step(comm):
            attn = make_attention("usp", comm)
            q, k, v = (
                torch.empty(1024, heads, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
                for heads in (32, 8, 8)
            )
            out = attn(q, k, v, layout, causal=True)
            out.backward(torch.empty_like(out))

        with cProfile.Profile() as profile:
            programs = simulate.record(step, ranks, mesh=(rows, 4), operators=False)
            outcome = simulate.play(programs, Cluster.preset(f"{ranks // 8}x8-h100"))
        assert outcome.ends.size == ranks and outcome.seconds > 0
        posts = (x for program in programs for x in program.actions if isinstance(x, Post))
        return sum(x.callcount for x in profile.getstats()) / sum(len(x.sends) for x in posts)

    calls_per_message(2)  # fills caches
    assert calls_per_message(16) < calls_per_message(4)


def test_new_memory_and_operators_have_a_price():
    kept = torch.empty(1000, device="meta")

    def step(comm):
        x = kept + kept  # 4,000 new bytes
        x.add_(kept)
        x.view(10, 100).mul_(2)

    (program,) = simulate.record(step, 1)
    (compute,) = program.actions
    assert compute.work == Operators(0, 3 * 4000 + 3 * 4000 + 2 * 4000, 4000, 3)
    device = dataclasses.replace(Cluster.preset("1x1-h100").device, new_memory=1e-3, operator=5.0)
    plain = dataclasses.replace(device, new_memory=0.0, operator=0.0)
    with_both, without = (price(x, [compute])[id(compute)] for x in (device, plain))
    assert with_both - without == pytest.approx(4000 * 1e-3 + 3 * 5.0)


def test_casts_below_autograd_are_counted():
    """There the operator is a view by its schema, since it may return what it is given."""

    def step(comm):
        with torch.inference_mode():
            half = torch.empty(1000, dtype=torch.bfloat16, device="meta")
            half.to(torch.float32).to(torch.float32)  # reads 2,000 bytes and writes 4,000, once

    (program,) = simulate.record(step, 1)
    assert [x.work for x in program.actions] == [Operators(0, 6000, 6000, 2)]


@pytest.mark.parametrize("name", ["ring", "all_gather", "token_ring", "mesh", "usp"])
def test_messages_are_posted_before_what_hides_them(name):
    """Under NCCL's rules a message begins no sooner than the last compute before its post ends.

    So each wait has a compute between it and its post, or both are before the first compute. Only
    USP's exchange of heads, of which are operands and results, hides behind nothing.
    """
    for program in recorded(name, LAYOUTS["zigzag"], operators=False):
        computes, posted = 0, {}
        for action in program.actions:
            if isinstance(action, Compute):
                computes += isinstance(action.work, SoftmaxCompute)
            elif isinstance(action, Post):
                posted[action.number] = computes, action.what
            elif isinstance(action, Wait):
                before, what = posted[action.number]
                assert before < computes or computes == 0 or what.endswith("heads"), what

"""Every strategy's own code under virtual time."""

import dataclasses
import threading

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd import detect_anomaly
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu
from torch.utils.flop_counter import FlopCounterMode

import seqpar
from seqpar import LASP2Attention, Layout, make_attention, simulate
from seqpar.balance import Cluster, Model
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
from seqpar.simulate.steps import recorded_layers
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
    hides under the former. In backward it hides under half of that, and gradients, which one call
    returns in bf16, under the other half."""
    layout = Layout.contiguous(256, 2)

    def step(comm):
        q, k, v = operands(comm.rank, layout)
        out = make_attention("ring", comm)(q, k, v, layout, causal=False)
        out.backward(torch.empty_like(out))

    programs = simulate.record(step, 2, operators=False)
    hop = 128 * 2 * (16 + 16) * 2  # rows × KV heads × (D + Dv) × bytes of bf16
    sends = [x.sends for x in programs[0].actions if isinstance(x, Post)]
    assert sends == [((1, hop),)] * 3
    on = dataclasses.replace(Cluster.preset("1x2-h100"), inside=Link(0.0, 1.0))
    for compute in (hop / 4, 1.5 * hop, 6 * hop):
        second = compute / (128 * 128 * 4)  # of each pair and query head
        pricing = lambda found, second=second: {id(x): x.area * second for x in found}  # noqa: E731
        found = simulate.play(programs, on, pricing=pricing)
        forward = max(compute, hop) + compute
        backward = max(compute / 2, hop) + compute + max(compute / 2, hop)
        (exposure,) = found.exposure.rounds
        assert exposure == pytest.approx((forward + backward, 4 * compute, 3 * hop))
        share = (forward + backward - 4 * compute) / (3 * hop)
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
    with pytest.raises(ValueError, match="must send tensors on the meta device only"):
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
    assert seqpar.core.hooks.hooks() == seqpar.core.hooks.Hooks()


def test_simulating_threads_change_no_other_call():
    layout, alone, operands = Layout.zigzag(8, 1), Layout.zigzag(32, 2), torch.randn(3, 8, 2, 4)
    attn = make_attention("ring", simulate.Comm("alone", 0, 1))

    def called():
        q, k, v = (x.clone().requires_grad_() for x in operands)
        out = attn(q, k, v, layout, causal=True)
        return out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))

    expected, programs = called(), recorded("ring", alone)
    found, begun, may_end = [None, None], *([threading.Event() for _ in range(2)] for _ in range(2))

    def simulate_in(number):
        def step(comm):
            begun[number].set()
            assert may_end[number].wait(60)
            code("ring", alone)(comm)

        found[number] = simulate.record(step, 2)

    threads = [threading.Thread(target=simulate_in, args=(i,)) for i in range(2)]
    for thread, event in zip(threads, begun, strict=True):
        thread.start()
        assert event.wait(60)
    for thread, event in zip(threads, may_end, strict=True):  # the first to begin ends first
        assert all(map(torch.equal, called(), expected))
        event.set()
        thread.join()
    assert all(map(torch.equal, called(), expected))
    for of_thread in found:
        assert [contents(x) for x in of_thread] == [contents(x) for x in programs]


MODES = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "anomaly": detect_anomaly,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "reference": lambda: seqpar.use_backend("reference"),
    "triton": lambda: seqpar.use_backend("triton"),
    "flops": lambda: FlopCounterMode(display=False),
    "saved tensors": save_on_cpu,
    "no hooks": lambda: disable_saved_tensors_hooks("refused"),
    "default device": lambda: torch.device("meta"),
    "trace": seqpar.trace,
    "fake": lambda: torch._subclasses.FakeTensorMode(),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
@pytest.mark.parametrize("mode", MODES)
def test_the_callers_modes_change_no_simulation(mode):
    hybrid = Model.preset("qwen3-next-80b")
    layout, cluster = Layout.zigzag([0, 64, 512], 2), Cluster.preset("1x2-h100")

    def simulated():
        recorded_layers.record_attention_once.cache_clear()
        operators._known.clear()
        step = simulate.step("ring", layout, cluster, hybrid)
        served = simulate.step(
            "disaggregated", Layout.contiguous(64, 1), cluster, hybrid, servers=1
        )
        return [(x.seconds, x.memory.tolist(), x.bytes.tolist()) for x in (step, served)]

    expected = simulated()
    with MODES[mode]():
        assert simulated() == expected
    if mode not in ("flops", "fake"):  # whose hooks run in users' modules, and whose tensors
        programs = [contents(x) for x in recorded("ring", layout)]
        with MODES[mode]():
            assert [contents(x) for x in recorded("ring", layout)] == programs


def test_a_rank_alone_sends_nothing():
    layout = Layout.zigzag([0, 5, 5, 64], 1)
    for name in STRATEGIES:
        mesh = (1, 1) if name in MESHES else None
        outcome = simulate.play(
            simulate.record(code(name, layout), 1, mesh=mesh), Cluster.preset("1x1-h100")
        )
        assert outcome.sent_bytes.tolist() == [0] and outcome.seconds > 0


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

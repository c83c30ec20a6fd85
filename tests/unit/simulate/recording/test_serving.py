"""Trainers and attention servers under virtual time, against what is worked out by hand."""

import dataclasses

import pytest
import torch

import seqpar
from seqpar import Layout, simulate
from seqpar.costs.cluster import Cluster
from seqpar.costs.device import Link
from seqpar.simulate.recording import serving
from seqpar.simulate.recording.program import Compute, Operators, SoftmaxCompute
from tests.unit.simulate.playback.test_play import cluster

LAYOUT = Layout.contiguous(512, 1)
FAST = {"latency": 0.0, "rate": 1e30}
ATTENTION, PRODUCT = 3.0, 2.0  # seconds


def priced(found):
    """A task's seconds, those of a matrix product, and none of anything else."""

    def seconds(work):
        if isinstance(work, SoftmaxCompute):
            return ATTENTION
        return PRODUCT if isinstance(work, Operators) and work.flops else 0.0

    return {id(x): seconds(x.work) for x in found}


def operands(backward):
    return [torch.empty(512, 4, 64, device="meta", requires_grad=backward) for _ in range(3)]


def whole(pool, backward=False, tasks=1):
    """A trainer's step: one call, in so many tasks."""
    attn = seqpar.DisaggregatedAttention(pool, tasks=tasks, tile=32)
    out = attn(*operands(backward), LAYOUT, causal=True)
    if backward:
        out.backward(torch.empty_like(out))


def played(step, trainers, servers, **link):
    programs = simulate.record_served(step, trainers, servers)
    on = cluster(devices=trainers + servers, **(FAST | link))
    return simulate.play(programs, on, pricing=priced)


@pytest.mark.parametrize(("trainers", "servers", "rounds"), [
    (1, 1, 1), (3, 1, 3), (4, 2, 2), (2, 4, 1), (3, 2, 2),
])  # fmt: skip
def test_servers_share_the_tasks_of_all_trainers(trainers, servers, rounds):
    """Of one task each."""
    outcome = played(whole, trainers, servers)
    assert outcome.seconds == rounds * ATTENTION
    assert outcome.busy[:trainers].sum() == 0
    assert outcome.busy[trainers:].sum() == trainers * ATTENTION


def test_tasks_of_a_trainer_go_to_all_servers():
    outcome = played(lambda pool: whole(pool, backward=True, tasks=8), 1, 4)
    computed = (outcome.busy[1:] / ATTENTION).tolist()
    assert sum(computed) >= 8 and max(computed) - min(computed) <= 1
    assert outcome.seconds <= (max(computed) + 2) * ATTENTION


def test_messages_match_real_requests_and_use_the_link():
    """Without computing a pass takes its bytes there and back, and they are what `traffic` says."""
    programs = simulate.record_served(lambda pool: whole(pool, backward=True), 1, 1)
    outcome = simulate.play(programs, cluster(devices=2), pricing=lambda x: {id(y): 0 for y in x})
    sent = outcome.sent_bytes
    assert outcome.seconds == pytest.approx(sent.sum())
    pool = serving.RecordedPool(None, 0, 1, 1, [])
    attn = seqpar.DisaggregatedAttention(pool, tasks=1, tile=32)
    rows = attn.traffic(*operands(True), LAYOUT, causal=True)
    assert sent[0] == sum(row.bytes for row in rows)
    out, lse, gradients = 512 * 4 * 64 * 4, 512 * 4 * 4, 3 * 512 * 4 * 64 * 4
    assert sent[1] == out + lse + gradients


def turns(begun_before):
    """Two nano-batches through layers of a product and attention; both are begun before either is
    finished, or one after the other."""

    def step(pool):
        attn = seqpar.DisaggregatedAttention(pool, tasks=1, tile=32)
        weights = torch.empty(256, 256, device="meta")

        def begin():
            torch.empty(512, 256, device="meta") @ weights
            return attn.begin(*operands(False), LAYOUT, causal=True)

        for _ in range(5):
            if begun_before:
                begun = begin(), begin()
                for each in begun:
                    attn.finish(each)
            else:
                for _ in range(2):
                    attn.finish(begin())

    return step


def test_alternating_nano_batches_hide_server_work():
    """A layer's two products, and the server's second task; without turns, all one by one."""
    assert played(turns(False), 1, 1).seconds == 5 * 2 * (PRODUCT + ATTENTION)
    assert played(turns(True), 1, 1).seconds == 5 * (PRODUCT + 2 * ATTENTION)


def test_memory_of_servers_is_not_the_trainers():
    alone, both = (
        simulate.record_served(whole, 1, 1)[0].peak_bytes,
        simulate.record_served(lambda pool: (whole(pool), whole(pool)), 1, 1)[0].peak_bytes,
    )
    inputs, results = 3 * 512 * 4 * 64 * 4, 512 * 4 * (64 + 1) * 4
    assert inputs + results <= alone == both < inputs + 6 * results


def test_the_devices_prices_hold_for_servers():
    programs = simulate.record_served(lambda pool: whole(pool, backward=True), 2, 1)
    on = dataclasses.replace(
        Cluster.preset("1x3-h100"), inside=Link(0.0, 1e30), between=Link(0.0, 1e30)
    )
    outcome = simulate.play(programs, on)
    kernels = [x for x in programs[2].each() if isinstance(x, Compute) and x.area]
    assert len(kernels) == 4 and outcome.busy[2] > 0
    assert {x.what for x in kernels} == {"disaggregated forward", "disaggregated backward"}


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ((5, 1, 1), ValueError, "step"),
    ((whole, 0, 1), ValueError, "trainers"),
    ((whole, 1, 0), ValueError, "servers"),
    ((lambda pool: pool.submit(3), 1, 1), ValueError, "request"),
    ((lambda pool: pool.report(), 1, 1), ValueError, "pool"),
])  # fmt: skip
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        simulate.record_served(*arguments)


def test_servers_take_what_comes_first():
    """Trainer 0 computes for 10 products before its call, trainer 1 for none before its three."""

    def step(pool):
        weights = torch.empty(256, 256, device="meta")
        for _ in range(0 if pool.trainer else 10):
            torch.empty(512, 256, device="meta") @ weights
        for _ in range(3 if pool.trainer else 1):
            whole(pool)

    outcome = played(step, 2, 1)
    assert outcome.ends[1] == 3 * ATTENTION
    assert outcome.seconds == 10 * PRODUCT + ATTENTION

"""Lower bounds of the time of programs."""

import dataclasses

import pytest
import torch

from seqpar import Layout, make_attention, simulate
from seqpar.balance import Cluster
from seqpar.simulate.playback.lower_bound import least_seconds
from seqpar.simulate.recording.program import (
    Begin,
    Compute,
    End,
    Operators,
    Post,
    Program,
    Wait,
)

CLUSTER = Cluster.preset("2x2-h100")
MESHES = {"mesh": (2, 2), "usp": (2, 2)}
FAST, SLOW = 1.0, 1e-4  # times the rates of links


def on_links(scale):
    inside, between = (
        dataclasses.replace(x, rate=scale * x.rate) for x in (CLUSTER.inside, CLUSTER.between)
    )
    return dataclasses.replace(CLUSTER, inside=inside, between=between)


@pytest.mark.parametrize("cut", [Layout.zigzag, Layout.contiguous])
@pytest.mark.parametrize("name", ["ring", "all_gather", "token_ring", "disaggregated", "mesh"])
def test_no_bound_exceeds_the_played_time(name, cut):
    layout = cut([0, 3000, 4096], 4)

    def code(comm):
        n = layout.tokens_on(comm.rank)
        q, k, v = (
            torch.empty(n, heads, 64, device="meta", requires_grad=True) for heads in (8, 2, 2)
        )
        out = make_attention(name, comm)(q, k, v, layout, causal=True)
        out.backward(torch.empty_like(out))

    programs = simulate.record(code, 4, mesh=MESHES.get(name))
    for cluster in map(on_links, (FAST, SLOW)):
        outcome = simulate.play(programs, cluster)
        bounds = [least_seconds({i: x}, cluster, 4) for i, x in enumerate(programs)]
        assert outcome.seconds / 4 < max(bounds) <= outcome.seconds
        assert least_seconds(dict(enumerate(programs)), cluster, 4) == max(bounds)


def test_computation_and_exchanges_bound_the_time():
    work = Compute(Operators(10**13, 0))
    big, small = 10**9, 10**6

    def program(peer, sizes):
        actions = [work]
        for number, nbytes in enumerate(sizes):
            message = ((peer, nbytes),)
            actions += [Post(number, message, message)]
        return Program([*actions, *(Wait(i) for i in range(len(sizes)))])

    def seconds(sizes):
        programs = [program(2, sizes), Program(), program(0, sizes), Program()]
        played = simulate.play(programs, CLUSTER).seconds
        return least_seconds({0: programs[0]}, CLUSTER, 4), played

    alone, played = seconds([])
    assert alone == played > 0
    few, played = seconds([small])
    assert few == alone < played
    many, played = seconds([big, big])
    link = CLUSTER.between
    assert many == pytest.approx(2 * (link.latency + big / link.rate))
    assert alone < many < played == pytest.approx(alone + many)


def test_concurrent_and_unordered_work_is_left_out():
    nested = Program([Compute(Operators(10**13, 0))])
    beside = Program([Begin(nested), Compute(Operators(10**12, 0)), End(nested)])
    assert least_seconds({0: beside}, CLUSTER, 4) < simulate.play([beside], CLUSTER).seconds
    message = ((1, 10**9),)
    posted = [Post(0, message, ()), Post(1, message, ()), Wait(0)]
    ordered, unordered = (Program(posted, ordered=x) for x in (True, False))
    one = CLUSTER.inside.latency + 10**9 / CLUSTER.inside.rate
    assert least_seconds({0: ordered}, CLUSTER, 4) == one  # nobody waits for the second message
    assert least_seconds({0: unordered}, CLUSTER, 4) == 0.0

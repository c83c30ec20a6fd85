"""The time of one rank's program, with peers that keep step, and a lower bound of it."""

import dataclasses

import pytest
import torch

from seqpar import Layout, make_attention, simulate
from seqpar.balance import Cluster
from seqpar.simulate.playback.one_rank import least_seconds, seconds_in_step
from seqpar.simulate.playback.playing import play
from seqpar.simulate.recording.program import (
    Begin,
    Compute,
    Copy,
    End,
    Operators,
    Post,
    Program,
    Serve,
    Wait,
)

CLUSTER = Cluster.preset("2x2-h100")
BIG, SMALL = 10**9, 10**6


def program(peer, *actions):
    """The actions, with numbers in place of exchanges with a peer and of waits for them."""
    posts = {i: Post(i, ((peer, x),), ((peer, x),)) for i, x in enumerate((BIG, SMALL))}
    return Program([posts[x] if isinstance(x, int) else x for x in actions])


@pytest.mark.parametrize("peers", [(1, 0), (2, None, 0)], ids=["inside", "between"])
def test_equal_ranks_take_the_simulated_time(peers):
    work = Compute(Operators(10**12, 0))
    programs = [
        Program() if peer is None else program(peer, 0, work, Wait(0), 1, work, work, Wait(1))
        for peer in peers
    ]
    expected = play(programs, CLUSTER).seconds
    assert seconds_in_step(programs[0], 0, CLUSTER) == pytest.approx(expected)


def test_exchanges_of_a_communicator_run_in_order():
    link = CLUSTER.inside
    seconds = [link.latency + x / link.rate for x in (BIG, SMALL)]
    both = program(1, 0, 1, Wait(1))
    assert seconds_in_step(both, 0, CLUSTER) == pytest.approx(sum(seconds))


def test_messages_to_other_nodes_share_the_nics():
    link, cluster = CLUSTER.between, dataclasses.replace(CLUSTER, nics=1)
    sent = Program([Post(0, ((2, BIG), (3, BIG)), ((2, BIG),)), Wait(0)])
    expected = link.latency + 2 * 2 * BIG / link.rate  # two messages; two devices on a NIC
    assert seconds_in_step(sent, 0, cluster) == pytest.approx(expected)


def test_nested_programs_run_concurrently():
    work, copy = Compute(Operators(10**12, 0)), Copy(BIG)
    inner = Program([copy])
    alone = [seconds_in_step(Program([x]), 0, CLUSTER) for x in (work, copy)]
    beside = Program([Begin(inner), work, End(inner)])
    assert seconds_in_step(beside, 0, CLUSTER) == pytest.approx(max(alone))


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
        bounds = [least_seconds({i: x}, cluster) for i, x in enumerate(programs)]
        assert outcome.seconds / 4 < max(bounds) <= outcome.seconds
        assert least_seconds(dict(enumerate(programs)), cluster) == max(bounds)


@pytest.mark.parametrize("sizes", [[], [SMALL], [BIG, BIG], [BIG, SMALL, BIG]])
@pytest.mark.parametrize("peer", [1, 2])
def test_alone_on_its_links_a_bound_is_exact(peer, sizes):
    def exchanging(peer):
        actions = [Compute(Operators(10**13, 0))]
        for number, nbytes in enumerate(sizes):
            message = ((peer, nbytes),)
            actions += [Post(number, message, message), Compute(Operators(10**12, 0))]
        return Program([*actions, *(Wait(i) for i in range(len(sizes)))])

    programs = [Program() for _ in range(4)]
    programs[0], programs[peer] = exchanging(peer), exchanging(0)
    played = play(programs, CLUSTER).seconds
    assert least_seconds({0: programs[0]}, CLUSTER) == pytest.approx(played)


def test_bounds_leave_out_what_may_overlap():
    message = ((1, BIG),)
    posts = Program([Post(0, message, ()), Wait(0)])
    beside = Program([Begin(posts), Compute(Operators(10**9, 0)), End(posts)])
    one = CLUSTER.inside.latency + BIG / CLUSTER.inside.rate
    assert least_seconds({0: posts}, CLUSTER) == one > least_seconds({0: beside}, CLUSTER) > 0
    unordered = dataclasses.replace(posts, ordered=False)
    assert least_seconds({0: unordered}, CLUSTER) == 0.0
    cores = dataclasses.replace(CLUSTER, overlaps=False)
    assert least_seconds({0: posts}, cores) == 0.0


def test_servers_and_cores_are_refused():
    with pytest.raises(ValueError, match="program"):
        seconds_in_step(Program([Serve({})]), 0, CLUSTER)
    with pytest.raises(ValueError, match="cluster"):
        seconds_in_step(Program(), 0, dataclasses.replace(CLUSTER, overlaps=False))

"""The time of one rank's program, with peers that keep step."""

import dataclasses

import pytest

from seqpar.balance import Cluster
from seqpar.simulate.playback.in_step import seconds_in_step
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


def test_servers_and_cores_are_refused():
    with pytest.raises(ValueError, match="program"):
        seconds_in_step(Program([Serve({})]), 0, CLUSTER)
    with pytest.raises(ValueError, match="cluster"):
        seconds_in_step(Program(), 0, dataclasses.replace(CLUSTER, overlaps=False))

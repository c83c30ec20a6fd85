"""Programs whose times are worked out by hand."""

import dataclasses
import json
import math
import random

import numpy as np
import pytest
import simpy

from seqpar import simulate
from seqpar.costs.cluster import Cluster
from seqpar.costs.device import Link
from seqpar.simulate.playback import network
from seqpar.simulate.playback.shares import ActiveJobs, Resource
from seqpar.simulate.recording.program import (
    Begin,
    Compute,
    End,
    Operators,
    Post,
    Program,
    ShardExchange,
    Wait,
)

PRESET = Cluster.preset("1x2-h100")
FAST = Link(0.0, 1e300)


def cluster(nodes=1, devices=2, nics=1, latency=0.0, rate=1.0, overlaps=True):
    """Equal links inside a node and between nodes, in bytes a second."""
    link = Link(latency, rate)
    sizes = {"nodes": nodes, "devices_per_node": devices, "nics": nics}
    links = {"inside": link, "between": link}
    return dataclasses.replace(PRESET, overlaps=overlaps, **sizes, **links)


def seconds(amount):
    """A compute of so many seconds, which counts as attention."""
    return Compute(Operators(amount, 0), "ring forward", area=amount)


def post(number, sends=(), recvs=(), channel=""):
    return Post(number, tuple(sends), tuple(recvs), channel, "ring forward", number)


def play(programs, on, ordered=True):
    """The outcome, at a second for each FLOP."""
    programs = [Program(list(actions), ordered=ordered) for actions in programs]
    pricing = lambda found: {id(x): x.work.flops for x in found}  # noqa: E731
    return simulate.play(programs, on, pricing=pricing)


def ends(programs, on, ordered=True):
    return play(programs, on, ordered).ends.tolist()


def send(size, to=1):
    """One rank sends, another receives."""
    return [post(0, [(to, size)]), Wait(0)]


def receive(size, source=0):
    return [post(0, recvs=[(source, size)]), Wait(0)]


@pytest.fixture(autouse=True)
def _no_buffers(monkeypatch):
    """Messages here are of few bytes, and connections hold none of them."""
    monkeypatch.setattr(network, "_SOCKET_BUFFER_BYTES", 0)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_message_takes_latency_plus_bytes_over_rate(ordered):
    on = cluster(latency=3.0, rate=2.0)
    assert ends([send(10), receive(10)], on, ordered) == [8.0, 8.0]


def test_a_message_starts_when_both_ends_posted_it():
    late = [seconds(7), *receive(10)]
    outcome = play([send(10), late], cluster())
    assert outcome.ends.tolist() == [17.0, 17.0]
    assert outcome.busy.tolist() == [0.0, 7.0] and outcome.waiting.tolist() == [17.0, 10.0]


@pytest.mark.parametrize(("compute", "end", "exposed"), [(4, 10.0, 6.0), (12, 12.0, 0.0)])
def test_it_hides_under_what_is_computed_meanwhile(compute, end, exposed):
    programs = [[post(0, [(1 - rank, 10)], [(1 - rank, 10)]), seconds(compute), Wait(0)]
                for rank in range(2)]  # fmt: skip
    outcome = play(programs, cluster())
    assert outcome.ends.tolist() == [end, end]
    assert outcome.exposure.rounds == ((end, float(compute), 10.0),)
    assert outcome.exposure.fraction == exposed / 10


def test_links_are_full_duplex():
    both = [[post(0, [(1 - rank, 10)], [(1 - rank, 10)]), Wait(0)] for rank in range(2)]
    assert ends(both, cluster()) == [10.0, 10.0]


@pytest.mark.parametrize(("nics", "end"), [(1, 20.0), (2, 10.0)])
def test_messages_of_a_node_share_its_nics(nics, end):
    on = cluster(nodes=2, devices=2, nics=nics)
    programs = [send(10, to=2), send(10, to=3), receive(10, source=0), receive(10, source=1)]
    assert ends(programs, on) == [end] * 4


def test_a_short_message_gives_its_share_back():
    """Two share a NIC until the short one has arrived, at 8; the other then has 6 bytes left."""
    on = cluster(nodes=2)
    programs = [send(4, to=2), send(10, to=3), receive(4, source=0), receive(10, source=1)]
    assert ends(programs, on) == [8.0, 14.0, 8.0, 14.0]


def test_a_device_has_one_port_within_its_node():
    on = cluster(devices=3)
    programs = [
        [post(0, [(1, 10), (2, 10)]), Wait(0)],
        receive(10),
        receive(10),
    ]
    assert ends(programs, on) == [20.0] * 3


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 4), (2, 8), (3, 10)])
def test_shards_enter_each_node_once(nodes, ranks):
    """While other messages and computation use the same links; a node may be partly empty."""
    shard = 12
    sizes = [min(4, ranks - 4 * node) for node in range(nodes)]

    def message(source, target):
        inside = source // 4 == target // 4
        return shard * ranks // sizes[target // 4] if inside else shard // sizes[target // 4]

    def programs(together):
        made = []
        for rank in range(ranks):
            peers = [peer for peer in range(ranks) if peer != rank]
            if together:
                shards = tuple((peer, shard) for peer in peers)
                exchange = ShardExchange(0, shards, shards, "parameters", "parameters")
            else:
                sends = tuple((peer, message(rank, peer)) for peer in peers)
                recvs = tuple((peer, message(peer, rank)) for peer in peers)
                exchange = Post(0, sends, recvs, "parameters", "parameters")
            ring = post(
                1, [((rank + 1) % ranks, 5 + rank)], [((rank - 1) % ranks, 5 + (rank - 1) % ranks)]
            )
            made.append([exchange, ring, seconds(rank), Wait(1), Wait(0)])
        return made

    on = cluster(nodes, 4, nics=2, latency=0.5)
    together, separate = (play(programs(x), on) for x in (True, False))
    assert together.ends == pytest.approx(separate.ends, rel=1e-12)
    assert together.waiting == pytest.approx(separate.waiting, rel=1e-12)
    ring_bytes = 5 + np.arange(ranks)
    assert (together.sent_bytes == (ranks - 1) * shard + ring_bytes).all()


def test_shards_are_exchanged_from_the_last_rank_on():
    exchange = ShardExchange(0, ((1, 4),), ((1, 4),)), ShardExchange(0, ((0, 4),), ((0, 4),))
    late = [seconds(3), exchange[1], Wait(0)]
    assert ends([[exchange[0], Wait(0)], late], cluster()) == [7, 7]
    with pytest.raises(ValueError, match="rank 0 for"):
        play([[exchange[0], Wait(0)], []], cluster())
    alone = ShardExchange(0, (), ())
    assert ends([[alone, Wait(0)]], cluster()) == [0]


def naive_ends(jobs, capacities):
    """When each job (start, seconds, resources) ends, by following all jobs at each change."""
    left, stops, now = {}, {}, 0.0
    while len(stops) < len(jobs):
        for i, (start, work, _) in enumerate(jobs):
            if start <= now and i not in left and i not in stops:
                left[i] = work
        load = [sum(jobs[i][2].count(x) for i in left) for x in range(len(capacities))]
        paces = {i: min(min(1, capacities[x] / load[x]) for x in jobs[i][2]) for i in left}
        following = [start - now for start, _, _ in jobs if start > now]
        passed = min([left[i] / paces[i] for i in left] + following)
        now += passed
        for i, pace in paces.items():
            left[i] -= passed * pace
        for i in [i for i, x in left.items() if x < 1e-9]:
            stops[i] = now
            del left[i]
    return [stops[i] for i in range(len(jobs))]


@pytest.mark.parametrize("seed", range(5))
def test_jobs_share_resources_like_single_jobs(seed):
    """Many jobs with the same resources are one group, which changes no time."""
    chosen = random.Random(seed)
    capacities = [1, 2, 1, 3]
    pairs = [(0,), (0, 1), (2, 3), (3, 3)]
    jobs = [
        (chosen.choice([0, 1, 2.5]), chosen.choice([1, 1, 2, 3.7]), chosen.choice(pairs))
        for _ in range(24)
    ]
    env = simpy.Environment()
    active, resources, stops = ActiveJobs(env), [Resource(x) for x in capacities], {}

    def start(i):
        _, work, used = jobs[i]
        active.start(work, [resources[x] for x in used], lambda: stops.update({i: env.now}))

    for i, (begin, _, _) in enumerate(jobs):
        env.timeout(begin).callbacks.append(lambda _, i=i: start(i))
    env.run()
    assert [stops[i] for i in range(len(jobs))] == pytest.approx(naive_ends(jobs, capacities))
    assert not any(x.load or x.groups for x in resources)


def test_messages_that_share_an_end_share_its_rate():
    """Two have half of it, of which 0.8 is left, until the short one has arrived, at 10."""
    on = cluster(nodes=2)
    on = dataclasses.replace(on, between=Link(0.0, 1.0, shared=0.8))
    programs = [send(4, to=2), send(10, to=3), receive(4, source=0), receive(10, source=1)]
    assert ends(programs, on) == [10.0, 16.0, 10.0, 16.0]
    with pytest.raises(ValueError, match="shared"):
        Link(0.0, 1.0, shared=1.5)


CROSSING = [  # rank 0 waits for what rank 1 posts behind an exchange with a third, which is late
    [post(0, recvs=[(1, 5)]), Wait(0)],
    [post(0, recvs=[(2, 5)]), post(1, [(0, 5)]), Wait(0), Wait(1)],
    [seconds(20), post(0, [(1, 5)]), Wait(0)],
]


def test_exchanges_of_a_communicator_run_one_after_another():
    assert ends(CROSSING, cluster(devices=3)) == [30.0, 30.0, 25.0]


def test_other_channels_and_gloo_do_not_share():
    apart = [[dataclasses.replace(x, channel="other") if isinstance(x, Post) and (rank, x.number)
              in ((0, 0), (1, 1)) else x for x in actions]
             for rank, actions in enumerate(CROSSING)]  # fmt: skip
    assert ends(apart, cluster(devices=3)) == [5.0, 25.0, 25.0]
    assert ends(CROSSING, cluster(devices=3), ordered=False) == [5.0, 25.0, 25.0]


def test_gloo_messages_between_two_ranks_are_serial():
    first = [post(0, [(1, 10)]), post(1, [(1, 10)]), Wait(0), Wait(1)]
    second = [post(0, recvs=[(0, 10)]), post(1, recvs=[(0, 10)]), Wait(0), seconds(1), Wait(1)]
    outcome = play([first, second], cluster(), ordered=False)
    waits = [x.stop for x in outcome.trace.events if x.kind == "wait" and x.rank == 1]
    assert waits == [10.0, 20.0]


def test_a_gloo_receive_waits_for_earlier_writes():
    """Rank 0 posts it at 2, while it writes to rank 1 until 10. Posted at first, it is known."""
    late = [post(0, [(1, 10)]), seconds(2), post(1, recvs=[(1, 10)]), Wait(0), Wait(1)]
    early = [post(0, [(1, 10)], [(1, 10)]), seconds(2), Wait(0)]
    other = [post(0, recvs=[(0, 10)]), post(1, [(0, 10)]), Wait(0), Wait(1)]
    assert ends([late, other], cluster(), ordered=False) == [20.0, 20.0]
    assert ends([early, other], cluster(), ordered=False) == [10.0, 10.0]


def test_cores_that_move_messages_hide_nothing():
    """Each has 5 seconds of compute, and moves 10 bytes out and 10 in."""
    both = [[post(0, [(1 - rank, 10)], [(1 - rank, 10)]), seconds(5), Wait(0)]
            for rank in range(2)]  # fmt: skip
    assert ends(both, cluster(overlaps=False), ordered=False) == [25.0, 25.0]
    # nor what a message takes however small it is
    assert ends(both, cluster(latency=1.0, overlaps=False), ordered=False) == [27.0, 27.0]


def test_ranks_share_cores_where_there_are_fewer():
    on = cluster(devices=2, overlaps=False)
    assert ends([[seconds(6)]] * 4, on) == [12.0] * 4
    assert ends([[seconds(6)]] * 2, on) == [6.0] * 2


def test_overlapped_work_is_waited_for_at_its_end():
    inner = Program([post(0, recvs=[(1, 10)]), Wait(0), seconds(3)])
    first = [Begin(inner), seconds(4), End(inner), seconds(1)]
    assert ends([first, send(10, to=0)], cluster()) == [14.0, 10.0]


def test_mismatched_programs_name_the_waiting_ranks():
    with pytest.raises(ValueError, match="other forever: rank 0 for 'ring forward', step 0"):
        play([send(10), []], cluster())
    for peer in (-1, 1):  # without a program
        with pytest.raises(ValueError, match="wait for each other forever: rank 0 for"):
            play([send(10, peer)], cluster())
    with pytest.raises(ValueError, match="rank 0 sends 10 bytes to rank 1, which expects 9"):
        play([send(10), receive(9)], cluster())
    with pytest.raises(ValueError, match="programs must be at most 2, one per device, got 3"):
        play([[]] * 3, cluster())
    with pytest.raises(ValueError, match="one Program for each rank"):
        simulate.play([], cluster())
    with pytest.raises(ValueError, match="must all be recorded with the same ordered"):
        simulate.play([Program(), Program(ordered=False)], cluster())
    for wrong in (-1.0, math.nan, math.inf):
        pricing = lambda found, wrong=wrong: {id(x): wrong for x in found}  # noqa: E731
        with pytest.raises(ValueError, match="pricing must give each compute its seconds, got"):
            simulate.play([Program([seconds(1)])], cluster(), pricing=pricing)
    with pytest.raises(ValueError, match="got None for 'ring forward', step 0"):
        simulate.play([Program([seconds(1)])], cluster(), pricing=lambda found: {})
    with pytest.raises(TypeError, match="cluster must be a Cluster"):
        simulate.play([Program()], 2)
    assert simulate.play([Program()], "1x2-h100").seconds == 0


def test_the_trace_is_that_of_a_real_one(tmp_path):
    outcome = play([[*send(10), seconds(2)], receive(10)], cluster())
    found = [(x.kind, x.start, x.stop, x.peers, x.bytes, x.area) for x in outcome.trace.events[:3]]
    assert found == [
        ("flight", 0.0, 10.0, (1,), 10, 0),
        ("wait", 0.0, 10.0, (1,), 0, 0),
        ("compute", 10.0, 12.0, (), 0, 2),
    ]
    assert outcome.trace.waited_for() == {
        ("ring forward", 0, (1,)): 10.0,
        ("ring forward", 0, (0,)): 10.0,
    }
    outcome.write(tmp_path / "trace.json")
    shown = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {x["ph"] for x in shown} == {"X", "b", "e", "M"}


def test_an_outcome_of_nothing_is_over_at_once():
    outcome = play([[]], cluster(devices=1))
    assert outcome.seconds == 0.0 and not math.isnan(outcome.waiting[0])
    assert "1 ranks, 0 s" in repr(outcome)


def test_a_gloo_send_ends_once_buffers_take_over(monkeypatch):
    """Its next message, to another rank, then shares its link."""
    monkeypatch.setattr(network, "_SOCKET_BUFFER_BYTES", 4)
    on = cluster(nodes=3, devices=1)
    assert ends([send(10), receive(10), []], on, ordered=False) == [6.0, 10.0, 0.0]
    assert ends([send(3), receive(3), []], on, ordered=False) == [0.0, 3.0, 0.0]
    assert ends([send(10), receive(10), []], on) == [10.0, 10.0, 0.0]
    sender = [*send(10), post(1, [(2, 8)]), Wait(1)]
    # 4 are left from 6 on, and each takes twice as long until 14; 8 − 4 have then been sent
    assert ends([sender, receive(10), receive(8)], on, ordered=False) == [14.0, 14.0, 18.0]

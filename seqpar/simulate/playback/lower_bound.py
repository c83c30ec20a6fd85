"""A lower bound of the time in which programs run, from some of the programs alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from seqpar.costs.cluster import Cluster
from seqpar.simulate.playback.network import Hardware
from seqpar.simulate.playback.op_costs import computes, price
from seqpar.simulate.recording.program import Compute, Post, Program, Wait


def least_seconds(programs: Mapping[int, Program], cluster: Cluster, ranks: int) -> float:
    """Return seconds that `play` takes at least if these are the programs of some of the ranks.

    A rank computes at its device's speed at most. On NCCL, the exchanges of a communicator run one
    after another, each as long as its slowest message on idle links.
    """
    hardware = Hardware(cluster, ranks)
    seconds = price(cluster.device, computes(programs.values()))
    return max(
        max(_computing(program, seconds), _exchanging(program, rank, hardware))
        for rank, program in programs.items()
    )


def _computing(program: Program, seconds: Mapping[int, float]) -> float:
    """Return the seconds of computation without nested programs, which run concurrently."""
    return sum(seconds[id(x)] for x in program.actions if isinstance(x, Compute))


def _exchanging(program: Program, rank: int, hardware: Hardware) -> float:
    """Return the time of the exchanges on the busiest communicator; 0 on gloo, where they overlap.

    They count up to the last exchange that the rank waits for, without nested programs.
    """
    if not program.ordered:
        return 0.0
    waited = {x.number for x in program.actions if isinstance(x, Wait)}
    ends: dict[str, float] = defaultdict(float)
    longest = 0.0
    for post in program.actions:
        if isinstance(post, Post):
            ways = [hardware.way(rank, peer, nbytes) for peer, nbytes in post.sends]
            ways += [hardware.way(peer, rank, nbytes) for peer, nbytes in post.recvs]
            ends[post.channel] += max((latency + time for latency, time, _ in ways), default=0.0)
            if post.number in waited:
                longest = max(longest, ends[post.channel])
    return longest

"""Play one rank's program without the programs of its peers, for a prediction or a lower bound."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from seqpar.costs.cluster import Cluster
from seqpar.simulate.playback.op_costs import computes, price
from seqpar.simulate.recording.program import Begin, Compute, Copy, End, Post, Program, Sizes, Wait


def seconds_in_step(program: Program, rank: int, cluster: Cluster) -> float:
    """Return the seconds of a rank's program, if each peer posts a message at the same time as the
    rank. A program is the list of a rank's computations, messages and waits.

    The programs of the peers are not needed, so the prediction is fast even for thousands of ranks.
    The time of waiting for slower ranks is not included, and messages of different nodes do not
    slow each other down.

    The exchanges of a communicator run one after another. A rank has two ports: a port for messages
    inside the node, and its fraction of the node's NICs. Each port sends and receives at the same
    time. An exchange takes the largest latency of its messages, plus the time for its bytes. The
    time for the bytes is the longest of four times: for sending and for receiving, over each of the
    two ports.

    Raises a ValueError if the cluster's devices do not overlap messages with computation, or if the
    program serves requests.
    """
    if not cluster.overlaps:
        raise ValueError(
            f"cluster must send messages while devices compute, got {cluster.name}, whose cores "
            "send messages themselves"
        )
    seconds = price(cluster.device, computes([program]))
    return _Clock(rank, cluster, seconds, is_bound=False).play(program, 0.0)


def least_seconds(programs: Mapping[int, Program], cluster: Cluster) -> float:
    """Return a lower bound on the seconds of `play`, from the programs of some of the ranks. A
    program is the list of a rank's computations, messages and waits.

    The bound assumes that peers post their messages immediately, and that no other rank uses the
    links. On gloo and on cores, the bound counts only computation, because exchanges can overlap
    and can be buffered. A program that runs concurrently with another program is counted only if it
    posts no messages. Raises a ValueError if a program serves requests.
    """
    seconds = price(cluster.device, computes(programs.values()))
    return max(
        _Clock(rank, cluster, seconds, is_bound=True).play(program, 0.0)
        if program.ordered and cluster.overlaps
        else sum(seconds[id(x)] for x in program.actions if isinstance(x, Compute))
        for rank, program in programs.items()
    )


class _Clock:
    def __init__(
        self, rank: int, cluster: Cluster, seconds: Mapping[int, float], is_bound: bool
    ) -> None:
        self._node, self._cluster = rank // cluster.devices_per_node, cluster
        self._seconds, self._is_bound = seconds, is_bound
        # A lower bound assumes that the rank can use all NICs of its node. A prediction assumes
        # that all devices of the node use the NICs equally.
        self._nics = max(1, cluster.nics) / (1 if is_bound else cluster.devices_per_node)
        self._free: dict[str, float] = defaultdict(float)  # by channel
        self._ends: dict[int, float] = {}  # ends of exchanges, by their number
        self._programs: dict[int, float] = {}  # ends of nested programs, by their id

    def play(self, program: Program, now: float) -> float:
        """Return the time at which a program that starts at `now` ends."""
        for action in program.actions:
            if isinstance(action, Compute):
                now += self._seconds[id(action)]
            elif isinstance(action, Post):
                seconds = max(self._direction(action.sends), self._direction(action.recvs))
                end = max(now, self._free[action.channel]) + seconds
                self._free[action.channel] = self._ends[action.number] = end
            elif isinstance(action, Wait):
                now = max(now, self._ends.get(action.number, now))
            elif isinstance(action, Copy):
                now += float(self._cluster.host.seconds(action.nbytes))
            elif isinstance(action, Begin):
                # Only a full simulation knows how the exchanges of the nested and the outer program
                # interleave.
                has_posts = any(isinstance(x, Post) for x in action.program.each())
                left_out = self._is_bound and has_posts
                end = now if left_out else self.play(action.program, now)
                self._programs[id(action.program)] = end
            elif isinstance(action, End):
                now = max(now, self._programs[id(action.program)])
            else:
                raise ValueError("program must not serve requests, as attention servers do")
        return now

    def _direction(self, messages: Sizes) -> float:
        cluster = self._cluster
        inside, between = list[float](), list[float]()
        for peer, nbytes in messages:
            if peer // cluster.devices_per_node == self._node:
                inside.append(nbytes / cluster.inside.rate)
            else:
                between.append(nbytes / cluster.between.rate)
        seconds = 0.0
        if inside:
            seconds = cluster.inside.latency + sum(inside)
        if between:
            shared = sum(between) / self._nics
            seconds = max(seconds, cluster.between.latency + max(*between, shared))
        return seconds

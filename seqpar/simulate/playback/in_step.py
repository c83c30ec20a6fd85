"""The time of one rank's program if its peers keep step with it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from seqpar.costs.cluster import Cluster
from seqpar.simulate.playback.op_costs import computes, price
from seqpar.simulate.recording.program import Begin, Compute, Copy, End, Post, Program, Wait


def seconds_in_step(program: Program, rank: int, cluster: Cluster) -> float:
    """Return the seconds of a rank's program if every peer posts its messages when the rank does.

    This needs no other program, so it also answers for thousands of ranks. The exchanges of a
    communicator run one after another. An exchange takes the largest latency of its messages, then
    the bytes of the busiest direction of the rank's two ports: the one inside its node, and its
    share of the node's NICs. Waiting for slower ranks and contention between nodes are not
    included.

    Raises:
        ValueError: if the cluster's devices do not overlap messages with computation, or if the
            program serves requests.
    """
    if not cluster.overlaps:
        raise ValueError(f"cluster {cluster.name}: its cores move messages themselves")
    seconds = price(cluster.device, computes([program]))
    return _Clock(rank, cluster, seconds).play(program, 0.0)


class _Clock:
    def __init__(self, rank: int, cluster: Cluster, seconds: Mapping[int, float]) -> None:
        self._node, self._cluster, self._seconds = (
            rank // cluster.devices_per_node,
            cluster,
            seconds,
        )
        self._free: dict[str, float] = defaultdict(float)  # by channel
        self._ends: dict[int, float] = {}  # by the number of the exchange
        self._programs: dict[int, float] = {}  # by the id of a nested program

    def play(self, program: Program, now: float) -> float:
        """Return when a program that starts at `now` ends."""
        for action in program.actions:
            if isinstance(action, Compute):
                now += self._seconds[id(action)]
            elif isinstance(action, Post):
                end = max(now, self._free[action.channel]) + self._exchange(action)
                self._free[action.channel] = self._ends[action.number] = end
            elif isinstance(action, Wait):
                now = max(now, self._ends[action.number])
            elif isinstance(action, Copy):
                now += float(self._cluster.host.seconds(action.nbytes))
            elif isinstance(action, Begin):
                self._programs[id(action.program)] = self.play(action.program, now)
            elif isinstance(action, End):
                now = max(now, self._programs[id(action.program)])
            else:
                raise ValueError("program must not serve requests")
        return now

    def _exchange(self, post: Post) -> float:
        return max(self._direction(post.sends), self._direction(post.recvs))

    def _direction(self, messages: Iterable[tuple[int, int]]) -> float:
        inside = between = latency = 0.0
        cluster = self._cluster
        for peer, nbytes in messages:
            if peer // cluster.devices_per_node == self._node:
                inside += nbytes / cluster.inside.rate
                latency = max(latency, cluster.inside.latency)
            else:
                between += nbytes / cluster.between.rate
                latency = max(latency, cluster.between.latency)
        return latency + max(inside, between * max(1.0, cluster.devices_per_node / cluster.nics))

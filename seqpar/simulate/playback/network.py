"""Simulate messages: when exchanges begin and end, for a backend and a cluster's links."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING

from seqpar.costs.cluster import Cluster
from seqpar.costs.device import FatTree, Torus
from seqpar.simulate.playback.shares import ActiveJobs, Resource
from seqpar.simulate.recording.program import Post, ShardExchange

if TYPE_CHECKING:
    import simpy

# The measured size of a connection's buffer on Linux (tcp_wmem). A sender on gloo is done when the
# rest of its message is in this buffer.
_SOCKET_BUFFER_BYTES = 2**22


class Hardware:
    """The cores, ports and NICs that a number of ranks use on a cluster.

    If devices send messages while they compute, each device has one port to the other devices of
    its node. Each NIC of a node and each link of a torus carries one message at full rate in each
    direction. The uplinks of a leaf switch carry messages up to the sum of their rates.

    If cores send the messages, one core of the sender and one core of the receiver are busy for the
    whole time of a message, including its latency. All ranks of a node share the cores of the node,
    because the operating system moves threads to idle cores.

    Each device has one link to the memory of its host. Copies in both directions share this link.

    The costs of messages that cores send come from profiles. A profile measures a message while the
    core computes.
    """

    def __init__(self, cluster: Cluster, ranks: int) -> None:
        self.cluster = cluster
        nodes = range(cluster.nodes)
        if ranks > cluster.ranks and (cluster.nodes > 1 or cluster.overlaps):
            raise ValueError(
                f"programs must be at most {cluster.ranks}, one per device, got {ranks}"
            )
        shared = ranks > cluster.ranks  # ranks must share cores
        self.nodes = [0 if shared else rank // cluster.devices_per_node for rank in range(ranks)]
        self._cores = [Resource(cluster.devices_per_node) for _ in nodes]
        inside, between = cluster.inside.shared, cluster.between.shared
        self._out, self._in = ([Resource(1, inside) for _ in range(ranks)] for _ in range(2))
        self._hosts = [Resource() for _ in range(ranks)]
        nics = max(1, cluster.nics)
        self._nics_out, self._nics_in = ([Resource(nics, between) for _ in nodes] for _ in range(2))
        self._fabric_links: dict[Hashable, Resource] = {}

    def core(self, rank: int) -> Resource | None:
        return None if self.cluster.overlaps else self._cores[self.nodes[rank]]

    def copying(self, rank: int, nbytes: int) -> tuple[float, list[Resource]]:
        """Return the seconds and the links of a copy between a rank's device and the memory of its
        host.
        """
        core = self.core(rank)
        seconds = float(self.cluster.host.seconds(nbytes))
        return seconds, [self._hosts[rank], *([] if core is None else [core])]

    def way(
        self, source: int, target: int, nbytes: float, played_end: str = "both"
    ) -> tuple[float, float, list[Resource]]:
        """Return a message's latency, the seconds for sending its bytes, and the ports, NICs, links
        or cores that it uses.

        If `played_end` is "source", only the ports, NICs, links and cores of the sender are
        returned. If `played_end` is "target", only the ports, NICs, links and cores of the receiver
        are returned.
        """
        a, b = self.nodes[source], self.nodes[target]
        link, latency = self.cluster.inside, self.cluster.inside.latency
        through = [self._out[source], self._in[target]]
        if a != b:
            link = self.cluster.between
            between = self._between(source, target)
            through = [self._nics_out[a], self._nics_in[b], *between]
            torus = isinstance(self.cluster.fabric, Torus)
            latency = link.latency * (len(between) if torus else 1)
        if not self.cluster.overlaps:
            shared = through if a != b else []
            return 0.0, latency + nbytes / link.rate, [*shared, self._cores[a], self._cores[b]]
        # An end uses a port or a NIC, and possibly the uplinks of a leaf switch.
        if played_end != "both":
            through = through[0::2] if played_end == "source" else through[1::2]
        return latency, nbytes / link.rate, through

    def _between(self, source: int, target: int) -> list[Resource]:
        fabric, nodes = self.cluster.fabric, (self.nodes[source], self.nodes[target])
        if isinstance(fabric, Torus):
            return [self._fabric_link(x, 1.0) for x in fabric.links(*nodes)]
        if fabric is None:
            return []
        leaves = [self._leaf(fabric, rank) for rank in (source, target)]
        if leaves[0] == leaves[1]:
            return []
        nics = fabric.nodes_per_leaf * (1 if fabric.rails else max(1, self.cluster.nics))
        uplinks = nics / fabric.oversubscription
        return [self._fabric_link((way, x), uplinks) for way, x in zip("ud", leaves, strict=True)]

    def _leaf(self, fabric: FatTree, rank: int) -> tuple[int, int]:
        """Return the number of a leaf switch and the rail, which together identify the switch to
        which a rank's NIC is connected.
        """
        return self.nodes[rank] // fabric.nodes_per_leaf, self.rail(rank)

    def rail(self, rank: int) -> int:
        fabric, devices = self.cluster.fabric, self.cluster.devices_per_node
        has_rails = isinstance(fabric, FatTree) and fabric.rails
        return rank % devices * max(1, self.cluster.nics) // devices if has_rails else 0

    def _fabric_link(self, key: Hashable, capacity: float) -> Resource:
        if key not in self._fabric_links:
            shared = self.cluster.between.shared
            self._fabric_links[key] = Resource(capacity, shared)
        return self._fabric_links[key]


class Flight:
    __slots__ = ("done", "following", "left", "messages", "post", "posted", "rank")

    def __init__(self, rank: int, post: Post, posted: float, done: simpy.Event) -> None:
        self.rank, self.post, self.posted, self.done = rank, post, posted, done
        self.left = 0  # the number of messages, or of ranks, for which the exchange still waits
        self.messages: list[_Message] = []
        self.following: Flight | None = None


class _Message:
    """A message, and the exchanges in which its sender and its receiver have posted it.

    `played_end` says whose program is simulated: "source" for the sender's, "target" for the
    receiver's, or "both".
    """

    __slots__ = ("begun", "ends", "nbytes", "played_end", "ready", "sender", "source", "target")

    def __init__(self, source: int, target: int, nbytes: int, played_end: str = "both") -> None:
        self.source, self.target, self.nbytes = source, target, nbytes
        self.played_end = played_end
        self.ends: list[Flight] = []
        self.sender: Flight | None = None
        self.begun, self.ready = 0, 0.0


class Network:
    """All messages of a simulation.

    A message starts when sender and receiver have begun their exchanges. The message takes the
    link's latency plus its bytes divided by the link's rate, or longer if other messages share the
    link.

    On gloo, a rank has one connection to each peer, and sends its messages to this peer one after
    another. When the rank posts a receive, gloo sends a notice to the peer on the same connection,
    after all earlier messages. Two exchanges in opposite directions therefore alternate, unless the
    receive was posted first. A sender can continue as soon as the bytes that are not sent yet fit
    into the connection's buffer.

    The program of a rank is the list of its computations, messages and waits. If the program of a
    rank is not simulated, the rank is assumed to post its messages at the same times as a simulated
    rank, its stand-in (`stand_ins.py`). If the program of only one end of a message is simulated,
    the message uses only the resources of this end.
    """

    def __init__(
        self, env: simpy.Environment, hardware: Hardware, ordered: bool, stand_ins: Sequence[int]
    ) -> None:
        """`stand_ins[rank]` is the rank whose program is simulated in place of the program of
        `rank`. It is `rank` itself if the program of `rank` is simulated.
        """
        self.shares = ActiveJobs(env)
        self._env, self._hardware, self._ordered = env, hardware, ordered
        self._stand_ins = dict(enumerate(stand_ins))
        # Exchanges are identified by rank and number. `_begun` are the exchanges that have begun;
        # the second attribute has the messages that wait until an exchange begins.
        self._begun: set[tuple[int, int]] = set()
        self._until_begun: dict[tuple[int, int], list[_Message]] = {}
        self._last: dict[tuple[int, str], Flight] = {}  # by (rank, channel)
        # By (source, target, channel): messages of which one end was posted, and whether it is the
        # sender's.
        self._open: dict[tuple[int, int, str], deque[tuple[_Message, bool]]] = {}
        # Only for gloo, by (source, target): pending writes, of which the first one is in progress.
        self._writing: dict[tuple[int, int], deque[Callable[[], None]]] = {}
        # By channel and rank: posts of a `ShardExchange`, which begins when all of its ranks have
        # posted it.
        self._gathering: dict[str, dict[int, Flight]] = {}

    def post(self, rank: int, post: Post) -> Flight:
        flight = Flight(rank, post, self._env.now, self._env.event())
        if isinstance(post, ShardExchange):
            flight.left = 1  # the exchange waits until all of its ranks have begun
        else:
            for sending, messages in ((False, post.recvs), (True, post.sends)):
                for peer, nbytes in messages:
                    if (stand_in := self._stand_ins.get(peer, peer)) == peer:
                        self._match(flight, rank, peer, nbytes, sending)
                    else:
                        self._add_played_end(flight, peer, nbytes, sending, stand_in)
            flight.left = len(flight.messages)
        last = self._last.get((rank, post.channel)) if self._ordered else None
        self._last[rank, post.channel] = flight
        if last is not None and last.left:
            last.following = flight
        else:
            self._begin(flight)
        return flight

    def _match(self, flight: Flight, rank: int, peer: int, nbytes: int, sending: bool) -> None:
        """Start a message between `rank` and `peer` if both have posted the message. If only `rank`
        has posted it, remember that.
        """
        source, target = (rank, peer) if sending else (peer, rank)
        waiting = self._open.setdefault((source, target, flight.post.channel), deque())
        if waiting and waiting[0][1] != sending:
            message, _ = waiting.popleft()
            if message.nbytes != nbytes:
                sizes = (nbytes, message.nbytes) if sending else (message.nbytes, nbytes)
                raise ValueError(
                    f"programs: rank {source} sends {sizes[0]} bytes to rank {target}, which "
                    f"expects {sizes[1]}, in {flight.post.what!r}, step {flight.post.step}"
                )
        else:
            message = _Message(source, target, nbytes)
            waiting.append((message, sending))
        message.ends.append(flight)
        message.sender = flight if sending else message.sender
        flight.messages.append(message)

    def _add_played_end(
        self, flight: Flight, peer: int, nbytes: int, sending: bool, stand_in: int
    ) -> None:
        source, target = (flight.rank, peer) if sending else (peer, flight.rank)
        message = _Message(source, target, nbytes, "source" if sending else "target")
        message.ends.append(flight)
        flight.messages.append(message)
        stand_in_exchange = stand_in, flight.post.number
        if stand_in_exchange in self._begun:
            message.begun += 1
        else:
            self._until_begun.setdefault(stand_in_exchange, []).append(message)

    def _begin(self, flight: Flight) -> None:
        exchange = flight.rank, flight.post.number
        self._begun.add(exchange)
        for message in self._until_begun.pop(exchange, ()):
            self._ready(message)
        if isinstance(flight.post, ShardExchange):
            self._gather(flight, flight.post)
            return
        receives = len(flight.post.recvs)  # receives come first in `messages`
        is_empty = not flight.left
        for i, message in enumerate(flight.messages):
            if self._ordered or i >= receives:
                self._ready(message)
            else:
                self._write(message.target, message.source, partial(self._notify, message))
        if is_empty:
            self._end(flight)

    def _gather(self, flight: Flight, post: ShardExchange) -> None:
        ranks = range(len(post.sends) + 1)
        flights = self._gathering.setdefault(post.channel, {})
        flights[flight.rank] = flight
        if len(flights) < len({self._stand_ins.get(rank, rank) for rank in ranks}):
            return
        del self._gathering[post.channel]
        for each in flights.values():
            each.left = 0
        if len(ranks) == 1:
            self._end(flight)
            return
        by_rail: dict[tuple[int, int], list[int]] = {}  # of each node
        for rank in ranks:
            place = self._hardware.nodes[rank], self._hardware.rail(rank)
            by_rail.setdefault(place, []).append(rank)
        shard = post.sends[0][1]
        for node in {self._hardware.nodes[rank]: None for rank in flights}:
            members = [rank for rank in ranks if self._hardware.nodes[rank] == node]
            # Includes shards that it passes on.
            from_each_of_node = shard * len(ranks) / len(members)
            for source, target in permutations(members, 2):
                self._send_together(flights, [source], [target], from_each_of_node)
            for (other, rail), outside in by_rail.items():
                inside = by_rail.get((node, rail))
                if other == node or inside is None:
                    continue
                self._send_together(flights, inside, outside, shard / len(outside))
                if outside[0] not in flights:  # otherwise the rank's own exchange sends the shard
                    self._send_together(flights, outside, inside, shard / len(inside))

    def _send_together(
        self,
        played: Mapping[int, Flight],
        senders: list[int],
        receivers: list[int],
        nbytes: float,
    ) -> None:
        """Send messages of equal size from all senders to all receivers, over the same links.

        `played` has an entry for each rank whose program is simulated. The programs of the senders
        are either all simulated or all not simulated. The programs of the receivers, too, are
        either all simulated or all not simulated.
        """
        flights = [played[rank] for rank in (*senders, *receivers) if rank in played]
        played_end = "both"
        if len(flights) < len(senders) + len(receivers):
            played_end = "source" if senders[0] in played else "target"
        latency, seconds, through = self._hardware.way(senders[0], receivers[0], nbytes, played_end)
        for flight in flights:
            flight.left += 1

        def arrive() -> None:
            for flight in flights:
                self._reach(flight)

        messages = len(senders) * len(receivers)
        self._after(latency, partial(self.shares.start, seconds, through, arrive, messages))

    def _notify(self, message: _Message) -> None:
        self._written(message.target, message.source)
        self._ready(message)

    def _ready(self, message: _Message) -> None:
        message.begun += 1
        if message.begun == 2:  # both ends have begun
            self._set_out(message)

    def _write(self, source: int, target: int, write: Callable[[], None]) -> None:
        """Start a write after all earlier writes from `source` to `target` have ended."""
        queue = self._writing.setdefault((source, target), deque())
        queue.append(write)
        if len(queue) == 1:
            write()

    def _written(self, source: int, target: int) -> None:
        queue = self._writing[source, target]
        queue.popleft()
        if queue:
            queue[0]()

    def _set_out(self, message: _Message) -> None:
        latency, seconds, through = self._hardware.way(
            message.source, message.target, message.nbytes, message.played_end
        )
        message.ready = self._env.now + latency
        buffered = 0.0 if self._ordered else min(1.0, _SOCKET_BUFFER_BYTES / max(1, message.nbytes))

        def go() -> None:
            delay = max(0.0, message.ready - self._env.now)
            unbuffered = seconds * (1.0 - buffered)
            if not unbuffered:
                self._after(delay, release_sender)
                return
            send = partial(self.shares.start, unbuffered, through, release_sender)
            self._after(delay, send)

        def release_sender() -> None:
            if not buffered:
                arrive()
                return
            sender = message.sender
            assert sender is not None
            message.ends.remove(sender)
            self._reach(sender)
            self.shares.start(seconds * buffered, through, arrive)

        def arrive() -> None:
            for flight in message.ends:
                self._reach(flight)
            if not self._ordered:
                self._written(message.source, message.target)

        if self._ordered:
            go()
        else:
            self._write(message.source, message.target, go)

    def _reach(self, flight: Flight) -> None:
        flight.left -= 1
        if not flight.left:
            self._end(flight)

    def _end(self, flight: Flight) -> None:
        flight.done.succeed()
        flight.messages = []
        if flight.following is not None:
            self._begin(flight.following)

    def _after(self, seconds: float, function: Callable[[], None]) -> None:
        if seconds:
            self._env.timeout(seconds).callbacks.append(lambda _: function())
        else:
            function()

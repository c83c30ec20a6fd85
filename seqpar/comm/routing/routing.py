"""Routing: messages between nodes are divided among all NICs, which other ranks of a node relay.

"Zeppelin: Balancing Variable-Length Workloads in Data Parallel Large Model Training" (2025), the
routing layer of its attention engine. A message of n bytes from one rank to one of another node
takes n·b_between seconds over the sender's NIC, while those of its node's other ranks are idle.
Over x NICs it goes in x pieces: to a proxy in the sender's node, from there to one in the
receiver's node, and from there to the receiver. That takes

    n·b_inside·(x − 1)/x + n·b_between/x + n·b_inside·(x − 1)/x

seconds, where b are seconds a byte, which is less if b_between > 2·b_inside. The ends are proxies
of their own NICs, so a piece that goes straight skips both hops inside nodes.

The paper divides each message. Here all messages of an exchange between two nodes are divided
together. If they load all NICs about equally, they go straight, as without routing. Else no NIC
carries more than an equal share of them, and of that first what it would carry anyway. Pieces leave
and arrive by NICs of the same number, as networks with a switch for each number want it.

Long pieces are cut into chunks, c of them, of which proxies send on one while they receive the
next. So the NICs work nearly all the time: of the formula's hops inside nodes only 1/c is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from seqpar.core.arguments import as_int, as_int_array, shown

_EVEN_RATIO = 17 / 16  # busiest NIC / its share, below which messages are not routed


@dataclass(frozen=True)
class Routing:
    """How messages between nodes are sent, for a module's `routing`.

    Nodes have equal numbers of ranks, which reach each other faster than other nodes. Each rank has
    a NIC, or shares one with its neighbours: that which the group's backend takes, NCCL the
    nearest, gloo that of `GLOO_SOCKET_IFNAME`. All ranks must make each call, and with layouts
    made alike, since ranks relay what others send.

    Args:
        node_size: how many consecutive ranks of the group (of a mesh, along its rows) a node has.
        nodes: in its place, the number of each rank's node, where these are not consecutive.
        nics: how many NICs a node has, of which each serves as many consecutive ranks of it.
            Default: one for each rank. 1: messages go straight.
        least_bytes: messages with fewer bytes go straight. Two more hops take two more latencies.
        chunk_bytes: of how many bytes chunks are, at least.
    """

    node_size: int | None = None
    nodes: Sequence[int] | None = None
    nics: int | None = None
    least_bytes: int = 2**20
    chunk_bytes: int = 2**22

    def __post_init__(self) -> None:
        if (self.node_size is None) == (self.nodes is None):
            found = f"node_size={shown(self.node_size)} and nodes={shown(self.nodes)}"
            raise ValueError(f"routing needs either node_size or nodes, got {found}")
        for name in ("node_size", "nics", "least_bytes", "chunk_bytes"):
            value = getattr(self, name)
            if value is not None or name.endswith("bytes"):
                object.__setattr__(self, name, as_int(name, value, 1))
        if self.nodes is not None:
            object.__setattr__(self, "nodes", tuple(as_int_array("nodes", self.nodes).tolist()))


class Nodes:
    """Which ranks share a node, and how messages pass from node to node.

    Attributes:
        of: (ranks,) the number of each rank's node, from 0.
        members: the ranks of each node, ascending.
        nics: how many NICs each has.
        least_bytes, chunk_bytes: as in `Routing`.
    """

    def __init__(self, routing: Routing, ranks: int) -> None:
        """Raise a ValueError if the ranks do not make nodes of equal size."""
        size, names = routing.node_size, routing.nodes
        if size is not None:
            if ranks % size:
                raise ValueError(f"node_size must divide the group's {ranks} ranks, got {size}")
            names = [rank // size for rank in range(ranks)]
        assert names is not None
        if len(names) != ranks:
            raise ValueError(f"nodes must have one entry a rank, {ranks}, got {len(names)}")
        numbers = {name: number for number, name in enumerate(sorted(set(names)))}
        self.of = [numbers[name] for name in names]
        self.members: list[list[int]] = [[] for _ in numbers]
        for rank, node in enumerate(self.of):
            self.members[node].append(rank)
        sizes = [len(ranks) for ranks in self.members]
        if len(set(sizes)) > 1:
            raise ValueError(f"nodes must have equal numbers of ranks, got {shown(sizes)}")
        self.least_bytes, self.chunk_bytes = routing.least_bytes, routing.chunk_bytes
        self.nics = sizes[0] if routing.nics is None else routing.nics
        if sizes[0] % self.nics:
            expected = f"divide the {sizes[0]} ranks of a node"
            raise ValueError(f"nics must {expected}, got {self.nics}")

    def mates(self, rank: int) -> list[int]:
        """Return the ranks of a rank's node, itself included."""
        return self.members[self.of[rank]]

    def nic(self, rank: int) -> int:
        """Return the number in its node of the NIC that a rank uses: neighbours share one."""
        mates = self.mates(rank)
        return mates.index(rank) * self.nics // len(mates)

    def proxy(self, rank: int, nic: int) -> int:
        """Return through which rank of its node a rank reaches a NIC: itself, if it is its own.

        Of those that share the NIC it is the one in the rank's own place.
        """
        mates = self.mates(rank)
        sharing = len(mates) // self.nics
        return mates[nic * sharing + mates.index(rank) % sharing]


def divided(
    sizes: list[int], used: list[tuple[int, int]], nics: int
) -> list[tuple[int, tuple[int, int], int]]:
    """Divide the messages from one node to another among the nodes' NICs, evenly.

    `sizes` are the messages', and `used` the NICs that each would use straight, of the sender's and
    the receiver's node. Return pieces (message, its NICs, its size), of each message in order. If
    messages are nearly even as they are, they go whole and straight. If not, no NIC carries more
    than its share; a piece keeps to the NICs of one number, and first to those from or to which
    nobody relays.
    """
    straight = [Counter[int](), Counter[int]()]
    for size, ends in zip(sizes, used, strict=True):
        for loads, nic in zip(straight, ends, strict=True):
            loads[nic] += size
    share = -(-sum(sizes) // nics)
    if max(max(loads.values()) for loads in straight) <= share * _EVEN_RATIO:
        return [(i, ends, size) for i, (size, ends) in enumerate(zip(sizes, used, strict=True))]
    # Pairs of NICs with different numbers would save no byte of a single message, add a hop, and
    # cross the spine of a network with one switch for each number.
    left, room, pieces = list(sizes), [share] * nics, []
    choices = [(i, nic) for i in range(len(sizes)) for nic in range(nics)]
    for i, nic in sorted(choices, key=lambda x: sum(nic != x[1] for nic in used[x[0]])):
        if size := min(left[i], room[nic]):
            pieces.append((i, (nic, nic), size))
            left[i] -= size
            room[nic] -= size
    return pieces

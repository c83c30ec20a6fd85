"""Routing: a message between nodes goes in parts, through several ranks of each, over their NICs.

"Zeppelin: Balancing Variable-length Workloads in Data Parallel Large Model Training" (2025), the
routing layer of its attention engine. A message of n bytes from one rank to one of another node
takes n·b_between seconds over the sender's NIC, while those of its node's other ranks are idle.
With x proxies in each node it is cut into x parts: part i goes to proxy i of the sender's node,
from there to proxy i of the receiver's node, and from there to the receiver. That takes

    n·b_inside·(x − 1)/x + n·b_between/x + n·b_inside·(x − 1)/x

seconds, where b are seconds a byte, and is less if b_between > 2·b_inside. The sender and the
receiver are proxies themselves, where they can be: then a part skips that hop. Parts keep to one
rail, from the i-th rank of a node to the i-th of the other, as networks with a switch a rail want.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from seqpar.arguments import as_int, as_int_array, shown

_ALIGNED = 16  # bytes: parts begin at multiples
HOPS = 3  # of a part, at most


@dataclass(frozen=True)
class Routing:
    """How messages between nodes are sent, for a module's `routing`.

    Ranks of one node reach each other fast, and each has a NIC, or shares one with its neighbours.
    Nodes have equal numbers of ranks. On `torch.distributed` a rank's NIC is what its backend
    chooses: NCCL takes the nearest, gloo that of `GLOO_SOCKET_IFNAME`.

    Args:
        node_size: how many consecutive ranks of the group (of a mesh, along its rows) a node has.
        nodes: in its place, the number of each rank's node, where these are not consecutive.
        proxies: through how many ranks of each node a message goes: as many as the node has NICs;
            it divides the number of its ranks. Default: all of them. 1: messages go straight.
        least_bytes: messages with fewer bytes go straight. Two more hops take two more latencies.
    """

    node_size: int | None = None
    nodes: Sequence[int] | None = None
    proxies: int | None = None
    least_bytes: int = 2**20

    def __post_init__(self) -> None:
        if (self.node_size is None) == (self.nodes is None):
            found = f"node_size={shown(self.node_size)} and nodes={shown(self.nodes)}"
            raise ValueError(f"routing needs either node_size or nodes, got {found}")
        for name, least in (("node_size", 1), ("proxies", 1), ("least_bytes", 1)):
            value = getattr(self, name)
            if value is not None or name == "least_bytes":
                object.__setattr__(self, name, as_int(name, value, least))
        if self.nodes is not None:
            object.__setattr__(self, "nodes", tuple(as_int_array("nodes", self.nodes).tolist()))


class Nodes:
    """Which ranks share a node, and how messages pass from node to node.

    Attributes:
        of: (ranks,) the number of each rank's node, from 0.
        members: the ranks of each node, ascending.
        proxies: through how many ranks of a node a message passes.
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
        self.proxies = sizes[0] if routing.proxies is None else routing.proxies
        if sizes[0] % self.proxies:
            expected = f"divide the {sizes[0]} ranks of a node"
            raise ValueError(f"proxies must {expected}, got {self.proxies}")

    def mates(self, rank: int) -> list[int]:
        """Return the ranks of a rank's node, itself included."""
        return self.members[self.of[rank]]

    def paths(self, sender: int, receiver: int) -> list[list[int]]:
        """Return the ranks that each part of a message passes, both ends included.

        Of a node whose neighbours share NICs, the proxies are as far apart as they can be, and the
        sender is one of them.
        """
        ours, theirs = self.mates(sender), self.mates(receiver)
        apart = len(ours) // self.proxies
        places = range(ours.index(sender) % apart, len(ours), apart)
        passed = [[sender, ours[i], theirs[i], receiver] for i in places]
        return [list(dict.fromkeys(path)) for path in passed]


class Described(NamedTuple):
    """A message as its two ends know it: (peer, elements, dtype), in the order of its sender."""

    peer: int
    elements: int
    dtype: str


class Place(NamedTuple):
    """Elements of a tensor that parts are sent from, or received into.

    Attributes:
        table: which list the tensor is in: 0 the messages that this rank sends, 1 those that it
            receives, 2 the parts that it holds for others.
        number: which of the list.
        start, stop: which of its elements.
    """

    table: int
    number: int
    start: int
    stop: int


SENT, RECEIVED, HELD = range(3)


class Hop(NamedTuple):
    """What a rank posts at once: (peer, place) of parts that it sends and of those it receives."""

    sends: list[tuple[int, Place]]
    recvs: list[tuple[int, Place]]


class Relaying(NamedTuple):
    """A rank's part in routing the messages of one exchange.

    Attributes:
        own: the messages that this rank sends and receives itself, in its own order.
        hops: what it posts first, and then, when all of this has arrived, and so on.
        held: (elements, dtype) of parts that it receives and sends on.
        messages, bytes: how many it sends in all hops, for itself and others.
    """

    own: tuple[list[Described], list[Described]]
    hops: list[Hop]
    held: list[tuple[int, torch.dtype]]
    messages: int
    bytes: int

    @classmethod
    def of(
        cls, nodes: Nodes, rank: int, known: dict[int, tuple[list[Described], list[Described]]]
    ) -> Relaying:
        """Return this rank's part in an exchange.

        `known` are the messages that each rank of its node sends to, and receives from, other
        nodes. Of a message between two nodes, both nodes know as much, and take its parts in the
        same order.
        """
        hops = [Hop([], []) for _ in range(HOPS)]
        held: list[tuple[int, torch.dtype]] = []
        messages = size = 0
        for sender, receiver, _, elements, name, index in sorted(_routed(known)):
            dtype = getattr(torch, name)
            step = _part(elements, dtype.itemsize, nodes.proxies)
            edges = [min(i * step, elements) for i in range(nodes.proxies + 1)]
            for path, (start, stop) in zip(
                nodes.paths(sender, receiver), pairwise(edges), strict=True
            ):
                if start == stop:
                    continue
                own = index, start, stop
                for hop, (source, target) in enumerate(pairwise(path)):
                    if rank == source:
                        first = Place(SENT, *own) if rank == sender else _last(held)
                        hops[hop].sends.append((target, first))
                        messages, size = messages + 1, size + (stop - start) * dtype.itemsize
                    elif rank == target:
                        if rank != receiver:
                            held.append((stop - start, dtype))
                        place = Place(RECEIVED, *own) if rank == receiver else _last(held)
                        hops[hop].recvs.append((source, place))
        return cls(known[rank], hops, held, messages, size)


def _routed(
    known: dict[int, tuple[list[Described], list[Described]]],
) -> Iterable[tuple[int, int, int, int, str, int]]:
    """Yield messages: sender, receiver, number between these two, elements, dtype, and index.

    The index is that among the messages of the one of the two that is in this node.
    """
    for rank, lists in known.items():
        for sending, described in zip((True, False), lists, strict=True):
            numbers: Counter[int] = Counter()
            for index, (peer, elements, dtype) in enumerate(described):
                ends = (rank, peer) if sending else (peer, rank)
                yield *ends, numbers[peer], elements, dtype, index
                numbers[peer] += 1


def _last(held: list[tuple[int, torch.dtype]]) -> Place:
    """Return the place of the last part that is held: a rank sends on what it just received."""
    return Place(HELD, len(held) - 1, 0, held[-1][0])


def _part(elements: int, itemsize: int, parts: int) -> int:
    """Return how many elements all parts but the last ones have."""
    aligned = max(1, _ALIGNED // itemsize)
    return -(-elements // (parts * aligned)) * aligned

"""Decide how the NICs of a node share its messages to other nodes, with other ranks as relays.

The method is the routing layer in "Zeppelin: Balancing Variable-Length Workloads in Data Parallel
Large Model Training" (2025). Without routing, a message of n bytes to a rank on another node uses
only the sender's NIC, while other NICs of the node may be idle. The message takes n·b_between
seconds. b_between is the time per byte between nodes, and b_inside is the time per byte within a
node.

With routing over x NICs, the message is cut into x *pieces*, one for each NIC. A *proxy* for a
piece is a rank that uses the NIC of the piece. A piece makes up to three *hops*, transfers from one
rank to another: from the sender to a proxy in the sender's node; from this proxy to a proxy in the
receiver's node; and from the second proxy to the receiver. This takes

    n·b_inside·(x − 1)/x + n·b_between/x + n·b_inside·(x − 1)/x

seconds. The time is less than n·b_between if b_between > 2·b_inside. The sender and the receiver
are proxies for their own NICs, so one of the x pieces makes no hops within nodes. The first term
and the last term therefore have the factor (x − 1)/x.

There are two differences from the paper. First, the paper divides each message separately. In this
file, the sum of all messages that one exchange sends between two nodes is divided evenly. If the
messages load all NICs about equally, they are sent directly. If the messages load NICs unequally,
they are cut so that each NIC carries at most the mean number of bytes. A NIC preferably carries
messages of the ranks that use this NIC. A piece uses NICs with the same index in both nodes,
because networks often connect the NICs of one index with a switch.

Second, long pieces are cut into c *chunks*. A proxy sends a chunk while it receives the next chunk:
the first hop of the second chunk is posted together with the second hop of the first chunk. NICs
between nodes are therefore busy nearly all the time. In the formula, the two terms with b_inside
shrink to about 1/c.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from seqpar.core.arguments import as_int, as_int_array, shown

# If the busiest NIC has at most this multiple of the mean bytes, messages are not routed.
_EVEN_RATIO = 17 / 16
_ALIGNMENT_BYTES = 16  # each piece begins at a multiple of this number of bytes
_MAX_CHUNKS = 8  # more chunks of a piece would cost too much latency


@dataclass(frozen=True)
class Routing:
    """How messages between nodes are sent. Pass it to a module as the argument `routing`.

    All nodes must have the same number of ranks. Communication within a node should be faster than
    between nodes. Each rank uses one NIC, and several neighbouring ranks may use the same NIC. The
    group's backend chooses the NIC: NCCL uses the nearest NIC, and gloo uses the NIC that
    `GLOO_SOCKET_IFNAME` names. Because ranks relay messages of other ranks, all ranks must make
    each call, and must make its layouts in the same way.

    Args:
        node_size: the number of ranks in a node. The ranks of a node must be consecutive. Ranks of
            a mesh are counted along its rows.
        nodes: for each rank, the index of its node. Use it instead of `node_size` if the ranks of a
            node are not consecutive.
        nics: the number of NICs per node. Each NIC is used by the same number of consecutive ranks.
            The default is one NIC for each rank. With 1, messages are sent directly.
        least_bytes: messages with fewer bytes are sent directly. A relayed message is sent up to
            three times, from rank to rank, and each time adds a latency.
        chunk_bytes: the smallest number of bytes in a chunk.
    """

    node_size: int | None = None
    nodes: Sequence[int] | None = None
    nics: int | None = None
    least_bytes: int = 2**20
    chunk_bytes: int = 2**22

    def __post_init__(self) -> None:
        if (self.node_size is None) == (self.nodes is None):
            found = f"node_size={shown(self.node_size)} and nodes={shown(self.nodes)}"
            raise ValueError(f"routing must have either node_size or nodes, got {found}")
        for name in ("node_size", "nics", "least_bytes", "chunk_bytes"):
            value = getattr(self, name)
            if value is not None or name.endswith("bytes"):
                object.__setattr__(self, name, as_int(name, value, 1))
        if self.nodes is not None:
            object.__setattr__(self, "nodes", tuple(as_int_array("nodes", self.nodes).tolist()))


class Nodes:
    """The nodes of a group, with their ranks and NICs (see `Routing`)."""

    def __init__(self, routing: Routing, ranks: int) -> None:
        """Raise a ValueError if the ranks do not form nodes of equal size."""
        size, names = routing.node_size, routing.nodes
        if size is not None:
            if ranks % size:
                raise ValueError(f"node_size must divide the group's {ranks} ranks, got {size}")
            names = [rank // size for rank in range(ranks)]
        assert names is not None
        if len(names) != ranks:
            raise ValueError(f"nodes must have one entry per rank, {ranks}, got {len(names)}")
        numbers = {name: number for number, name in enumerate(sorted(set(names)))}
        # (ranks,): the index of each rank's node.
        self.of = [numbers[name] for name in names]
        self.members: list[list[int]] = [[] for _ in numbers]  # the ranks of each node, ascending
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
        return self.members[self.of[rank]]

    def nic(self, rank: int) -> int:
        mates = self.mates(rank)
        return mates.index(rank) * self.nics // len(mates)

    def proxy(self, rank: int, nic: int) -> int:
        """Return the rank that relays messages of `rank` through a NIC of the same node.

        The result is `rank` itself if `rank` uses this NIC. If several ranks share each NIC, the
        n-th user of a NIC relays the messages of the n-th user of every other NIC.
        """
        mates = self.mates(rank)
        sharing = len(mates) // self.nics
        return mates[nic * sharing + mates.index(rank) % sharing]


def divided(
    sizes: list[int], used: list[tuple[int, int]], nics: int
) -> list[tuple[int, tuple[int, int], int]]:
    """Divide the messages from one node to another node evenly among the NICs of the nodes.

    If the messages already load the NICs nearly evenly, they are not cut. If not, messages are cut
    into pieces so that no NIC carries more than an equal share of the bytes. A piece uses NICs with
    the same index in both nodes, preferably those of its sender or its receiver.

    Args:
        sizes: the size of each message.
        used: for each message, the indices of the two NICs that a direct message would use.
        nics: the number of NICs per node.

    Returns:
        Pieces (message, indices of the two NICs, size), in order within each message.
    """
    straight = [Counter[int](), Counter[int]()]
    for size, ends in zip(sizes, used, strict=True):
        for loads, nic in zip(straight, ends, strict=True):
            loads[nic] += size
    share = -(-sum(sizes) // nics)
    if max(max(loads.values()) for loads in straight) <= share * _EVEN_RATIO:
        return [(i, ends, size) for i, (size, ends) in enumerate(zip(sizes, used, strict=True))]
    # NICs with different indices are not used. For a single message, they would not reduce the
    # bytes of any NIC, and would add a hop. In a network with one switch for each index, the piece
    # would also cross the spine.
    left, room, pieces = list(sizes), [share] * nics, []
    choices = [(i, nic) for i in range(len(sizes)) for nic in range(nics)]
    for i, nic in sorted(choices, key=lambda x: sum(nic != x[1] for nic in used[x[0]])):
        if size := min(left[i], room[nic]):
            pieces.append((i, (nic, nic), size))
            left[i] -= size
            room[nic] -= size
    return pieces


class Described(NamedTuple):
    """A message between this rank and a peer, described by its size and dtype."""

    peer: int
    elements: int
    dtype: str


# the messages that a rank sends, and those that it receives
Ends = tuple[list[Described], list[Described]]


class PieceLocation(NamedTuple):
    """The elements start … stop − 1 of a tensor, from which a piece of a message is sent, or into
    which it is received.
    """

    # Which list contains the tensor: SENT and RECEIVED are this rank's own messages, HELD are the
    # pieces that it relays.
    table: int
    number: int  # the index of the tensor in this list
    start: int
    stop: int


SENT, RECEIVED, HELD = range(3)


class RelayHop(NamedTuple):
    sends: list[tuple[int, PieceLocation]]
    recvs: list[tuple[int, PieceLocation]]


class Relaying(NamedTuple):
    own: Ends  # the messages that the rank itself sends and receives, in its order
    # The pieces of each hop. A hop is posted when the previous hop has arrived. Hop 0 sends the
    # first chunks on their first hop. Hop 1 sends the first chunks on their second hop and the
    # second chunks on their first hop, and so on.
    hops: list[RelayHop]
    # (elements, dtype) of the pieces that the rank relays.
    held: list[tuple[int, torch.dtype]]
    messages: int  # how many messages it sends in all hops, including relayed ones
    bytes: int  # the bytes of these messages

    @classmethod
    def of(cls, nodes: Nodes, rank: int, known: dict[int, Ends]) -> Relaying:
        """Return the messages that a rank sends, receives and relays in an exchange.

        `known` has, for each rank of this node, the messages between that rank and other nodes.
        Both the node that sends a message and the node that receives it know the message. If the
        message is cut into pieces, the ranks of both nodes process the pieces in the same order.
        """
        hops = [RelayHop([], [])]
        held: list[tuple[int, torch.dtype]] = []
        messages = size = 0
        for message, nics, chunk, start, stop in _pieces(nodes, sorted(_routed(known))):
            sender, receiver, _, _, dtype, position = message
            out, into = nodes.proxy(sender, nics[0]), nodes.proxy(receiver, nics[1])
            own = position, start, stop
            path = dict.fromkeys([sender, out, into, receiver])
            hops += [RelayHop([], []) for _ in range(chunk + len(path) - 1 - len(hops))]
            for hop, (source, target) in enumerate(pairwise(path), chunk):
                if rank == source:
                    place = PieceLocation(SENT, *own) if rank == sender else _last(held)
                    hops[hop].sends.append((target, place))
                    messages, size = messages + 1, size + (stop - start) * dtype.itemsize
                elif rank == target:
                    if rank != receiver:
                        held.append((stop - start, dtype))
                    place = PieceLocation(RECEIVED, *own) if rank == receiver else _last(held)
                    hops[hop].recvs.append((source, place))
        return cls(known[rank], hops, held, messages, size)


class _Message(NamedTuple):
    sender: int
    receiver: int
    number: int  # its index among the messages from this sender to this receiver
    elements: int
    dtype: torch.dtype
    position: int  # its index in the list of the rank of this node that described it


def _pieces(
    nodes: Nodes, messages: Iterable[_Message]
) -> Iterator[tuple[_Message, tuple[int, int], int, int, int]]:
    """Yield the chunks of all messages, in an order that is the same on both nodes of each message.

    A message is cut into pieces, which are sent through different NICs, and a piece is cut into
    chunks. A chunk is (message, indices of the two NICs, index of the chunk in its piece, start,
    stop). The chunk has the elements start … stop − 1 of the message.
    """
    by_nodes: dict[tuple[int, int], list[_Message]] = {}
    for message in messages:
        ends = nodes.of[message.sender], nodes.of[message.receiver]
        by_nodes.setdefault(ends, []).append(message)
    for between in by_nodes.values():
        used = [(nodes.nic(message.sender), nodes.nic(message.receiver)) for message in between]
        units = [-(-x.elements * x.dtype.itemsize // _ALIGNMENT_BYTES) for x in between]
        pieces, done = divided(units, used, nodes.nics), [0] * len(between)
        chunks = 1
        if any(nics != used[i] for i, nics, _ in pieces):
            share = sum(units) * _ALIGNMENT_BYTES // nodes.nics
            chunks = min(max(share // nodes.chunk_bytes, 1), _MAX_CHUNKS)
        for i, nics, count in pieces:
            message, elements = between[i], _ALIGNMENT_BYTES // between[i].dtype.itemsize
            edges = [done[i] + count * chunk // chunks for chunk in range(chunks + 1)]
            done[i] = edges[-1]
            for chunk, ends in enumerate(pairwise(edges)):
                start, stop = (min(edge * elements, message.elements) for edge in ends)
                if start < stop:
                    yield message, nics, chunk, start, stop


def _routed(known: dict[int, Ends]) -> Iterator[_Message]:
    for rank, lists in known.items():
        for sending, described in zip((True, False), lists, strict=True):
            numbers: Counter[int] = Counter()
            for position, (peer, elements, dtype) in enumerate(described):
                ends = (rank, peer) if sending else (peer, rank)
                yield _Message(*ends, numbers[peer], elements, getattr(torch, dtype), position)
                numbers[peer] += 1


def _last(held: list[tuple[int, torch.dtype]]) -> PieceLocation:
    return PieceLocation(HELD, len(held) - 1, 0, held[-1][0])

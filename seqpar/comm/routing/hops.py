"""The messages that each rank posts, hop by hop, if messages between nodes share NICs.

A piece (`routing.py`) takes up to three hops: to a proxy in the sender's node, to a proxy in the
receiver's node, and to the receiver. Chunks of a piece follow each other: the first hop of the
second chunk is posted together with the second hop of the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from seqpar.comm.routing.routing import Nodes, divided

_ALIGNMENT_BYTES = 16  # of each piece's start
_MAX_CHUNKS = 8  # per piece; each costs an exchange's latency


class Described(NamedTuple):
    """A message as its two ends know it: (peer, elements, dtype), in the order of its sender."""

    peer: int
    elements: int
    dtype: str


Ends = tuple[list[Described], list[Described]]  # the messages that a rank sends and receives


class PieceLocation(NamedTuple):
    """Elements start … stop − 1 of a tensor, from or into which a piece is sent or received."""

    table: int  # of SENT messages of this rank, RECEIVED ones, or pieces HELD for other ranks
    number: int  # the tensor's index in the table
    start: int
    stop: int


SENT, RECEIVED, HELD = range(3)


class RelayHop(NamedTuple):
    """The pieces that a rank posts together, (peer, location) of each: sent and received."""

    sends: list[tuple[int, PieceLocation]]
    recvs: list[tuple[int, PieceLocation]]


class Relaying(NamedTuple):
    """A rank's part in routing the messages of one exchange."""

    own: Ends  # in its own order
    # The pieces that it posts first, those that it posts when these have arrived, and so on: first
    # hops of first chunks, then their second hops and first hops of second chunks.
    hops: list[RelayHop]
    held: list[tuple[int, torch.dtype]]  # (elements, dtype) of pieces that it receives and sends on
    messages: int  # that it sends in all hops, for itself and for others
    bytes: int  # of these messages

    @classmethod
    def of(cls, nodes: Nodes, rank: int, known: dict[int, Ends]) -> Relaying:
        """Return this rank's part in an exchange.

        `known` has the messages that each rank of this node sends to and receives from other nodes.
        The two nodes of a message know the same about it, and process its pieces in the same order.
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
    """A message between nodes."""

    sender: int
    receiver: int
    number: int  # among the messages between the two ranks, in their order
    elements: int
    dtype: torch.dtype
    position: int  # among the messages of that end which is in this rank's node


def _pieces(
    nodes: Nodes, messages: Iterable[_Message]
) -> Iterator[tuple[_Message, tuple[int, int], int, int, int]]:
    """Yield the chunks of pieces, in an order on which the two nodes of a message agree.

    Each chunk is (message, NICs of the sender's and the receiver's node, the chunk's number in the
    piece, start, stop), with a range of elements.
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
    """Return the location of the last held piece, which the rank has just received."""
    return PieceLocation(HELD, len(held) - 1, 0, held[-1][0])

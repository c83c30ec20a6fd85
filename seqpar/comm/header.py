"""Say what messages are for, so that a rank never takes those of one call for those of another.

An exchange is named by the number of its call between the two ranks (`numbers.py`), its strategy
and pass, and its step. On gloo a rank sends each peer of an exchange, whichever way its messages
go, a *header*: the exchange's name, and the sizes and dtypes of the messages both ways. Headers
between two ranks are matched by order, all of one hop with one tag. So if two ranks are in
different exchanges, each receives the other's header. Messages have tags that follow from their
sender's header, so none is received into a buffer that is meant for another: the results would be
wrong, or, if sizes differ, gloo would abort the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Message = tuple[int, Tensor]  # (peer, tensor)
_SIZE = 256  # bytes of a header; a longer one is cut, behind the checksum of all of it
_HEADER_TAG = 0x5EA  # of a hop; those of later hops follow it
_MESSAGE_TAGS = 1 << 30  # so many, from this number on: users' own tags seldom are as large


class Exchange(NamedTuple):
    """The name of an exchange.

    Attributes:
        call: the number of its call (`numbers.py`); 0 outside calls.
        label: the strategy and its pass, as in "ring backward".
        step: the strategy's step that needs the messages.
        hop: at which of the hops of messages that others relay it is (`relays.py`), from 0.
    """

    call: int
    label: str
    step: int
    hop: int = 0

    def __str__(self) -> str:
        hop = f", hop {self.hop}" if self.hop else ""
        return f"call {self.call}, step {self.step} of {self.label}{hop}"


class Header:
    """What a rank says to a peer of the messages that it sends there and receives from there."""

    def __init__(self, exchange: Exchange, sends: str, recvs: str) -> None:
        """Name the exchange, and what `listed` says of the tensors that are sent and received."""
        text = f"{exchange}|{sends}|{recvs}".encode()
        self._checksum = crc32(text)
        self.data = bytearray((b"%08x|%b" % (self._checksum, text))[:_SIZE].ljust(_SIZE))

    def tag(self, index: int) -> int:
        """Return the tag of the message that the rank sends as number `index`."""
        return _MESSAGE_TAGS + (self._checksum + index) % _MESSAGE_TAGS


def listed(tensors: Sequence[Tensor]) -> str:
    """Return what a header says of messages."""
    return ", ".join([f"{x.numel()} {x.dtype}" for x in tensors])


class AwaitedHeader(NamedTuple):
    """A header that is under way from a peer."""

    peer: int
    work: dist.Work
    expected: bytearray
    received: bytearray  # its memory is received into, until `work` is done


def post(
    group: ProcessGroup,
    exchange: Exchange,
    numbers: Mapping[int, int],
    sends: list[Message],
    recvs: list[Message],
) -> tuple[list[dist.Work], list[AwaitedHeader]]:
    """Post messages on gloo, with headers, receives first.

    Return the works that are under way, and the headers, to be waited for before them. Peers are
    ranks of the group, and with each the exchange's call has one of `numbers`.
    """
    by_peer: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
    for direction, messages in enumerate((sends, recvs)):
        for peer, tensor in messages:
            by_peer.setdefault(peer, ([], []))[direction].append(tensor)
    works, awaited, outgoing = [], [], []
    for peer, (sent, received) in by_peer.items():
        named, data = exchange._replace(call=numbers[peer]), bytearray(_SIZE)
        sends_listed, recvs_listed = listed(sent), listed(received)
        theirs = Header(named, recvs_listed, sends_listed)
        work = group.recv([_as_tensor(data)], peer, _HEADER_TAG + exchange.hop)
        awaited.append(AwaitedHeader(peer, work, theirs.data, data))
        works += [group.recv([x], peer, theirs.tag(i)) for i, x in enumerate(received)]
        outgoing.append((peer, Header(named, sends_listed, recvs_listed), sent))
    for peer, ours, sent in outgoing:
        works.append(group.send([_as_tensor(ours.data)], peer, _HEADER_TAG + exchange.hop))
        works += [group.send([x], peer, ours.tag(i)) for i, x in enumerate(sent)]
    return works, awaited


def disagreement_of(headers: list[AwaitedHeader], names: Sequence[str], rank: int) -> str | None:
    """Wait for headers; return how the first that is not as expected differs, if one is.

    `names` are what messages call the group's ranks, of which this is `rank`.
    """
    for awaited in headers:
        awaited.work.wait()
        if awaited.received != awaited.expected:
            return disagreement(awaited, names[awaited.peer], names[rank])
    return None


def disagreement(header: AwaitedHeader, peer: str, rank: str) -> str:
    """Return how a header differs from what was expected.

    `peer` and `rank` are what messages call the peer and this rank.
    """
    theirs, their_sends, their_recvs = _fields(header.received)
    ours, our_recvs, our_sends = _fields(header.expected)
    if theirs != ours:
        rule = "all ranks must make the same calls, and run their backwards, in the same order"
        return f"{peer} is in {theirs}, while {rank} is in {ours}: {rule}"
    return (
        f"{peer} and {rank} are in {ours}, but {peer} sends {their_sends} and receives "
        f"{their_recvs}, while {rank} receives {our_recvs} and sends {our_sends}: did all ranks "
        "make the same call? check_ranks=True finds out"
    )


def _fields(header: bytearray) -> list[str]:
    """Return the exchange's name, and lists of what is sent and received, if they are not cut."""
    text = header.decode(errors="replace").replace("torch.", "").rstrip()
    _, name, *lists = [*text.split("|"), "…", "…"]
    return [name, *(f"({x})" if x else "nothing" for x in lists[:2])]


def _as_tensor(data: bytearray) -> Tensor:
    """Return bytes as a tensor that shares their memory."""
    return torch.frombuffer(data, dtype=torch.uint8)

"""Headers that identify messages, so that a rank never confuses the messages of two calls.

The name of an exchange has the number of its call between the two ranks (`sequence_numbers.py`),
its strategy and pass, and its step. On gloo, a rank sends a *header* to each peer of an exchange,
even if it only receives messages from the peer. The header has a digest of the call's arguments
(`digest.py`), the exchange's name, and the sizes and dtypes of the messages in both directions.

Headers between two ranks are matched by order, with one tag per hop. If two ranks are in different
exchanges, or have different arguments, each receives a header that it does not expect. Tags of
messages are computed from their sender's header, so a message never arrives in another one's
buffer. Otherwise results would be wrong or, with other sizes, gloo would abort the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from seqpar.comm.messages.digest import DIGEST_BYTES, NO_DIGEST, CallDigest
from seqpar.core.arguments import shown

Message = tuple[int, Tensor]  # (peer, tensor)
_HEADER_BYTES = 256  # longer text is cut; the checksum covers all of it
_CHECKSUM_BYTES = 8  # hexadecimal digits; the digest's table and text follow
_TEXT = _CHECKSUM_BYTES + DIGEST_BYTES  # where the text begins
_CHECK = "rank check"  # the label of an exchange in which ranks compare a call
# For a pass's first hop. Later hops use the following tags, because the relaying thread's hops and
# the main thread's first hops overtake each other.
_FIRST_HEADER_TAG = 0x5EA
_FIRST_MESSAGE_TAG = 1 << 30  # high, since users' own tags are usually small


class Exchange(NamedTuple):
    """The name of an exchange.

    Attributes:
        call: the number of its call (`sequence_numbers.py`); 0 outside calls.
        label: the strategy and its pass, such as "ring backward".
        step: the strategy's step that needs the messages.
        hop: the number of the hop of relayed messages (`relays.py`), from 0.
    """

    call: int
    label: str
    step: int
    hop: int = 0

    def __str__(self) -> str:
        hop = f", hop {self.hop}" if self.hop else ""
        return f"call {self.call}, step {self.step} of {self.label}{hop}"


class Header:
    """A rank's description of the messages that it exchanges with one peer."""

    def __init__(
        self, exchange: Exchange, sends: str, recvs: str, table: bytes = NO_DIGEST.table
    ) -> None:
        """`sends` and `recvs` are the texts of `listed`, and `table` is the digest's table."""
        text = table + f"{exchange}|{sends}|{recvs}".encode()
        self._checksum = crc32(text)
        self.data = bytearray(
            (b"%08x%b" % (self._checksum, text))[:_HEADER_BYTES].ljust(_HEADER_BYTES)
        )

    def tag(self, index: int) -> int:
        """Return the tag of the message number `index` of the header's sender."""
        return _FIRST_MESSAGE_TAG + (self._checksum + index) % _FIRST_MESSAGE_TAG


def listed(tensors: Sequence[Tensor]) -> str:
    """Return the sizes and dtypes of messages as text."""
    return ", ".join([f"{x.numel()} {x.dtype}" for x in tensors])


class AwaitedHeader(NamedTuple):
    """A header that has not yet arrived from a peer."""

    peer: int
    work: dist.Work
    expected: bytearray
    received: bytearray  # the receive buffer; valid when `work` is done


def post(
    group: ProcessGroup,
    exchange: Exchange,
    numbers: Mapping[int, int],
    sends: list[Message],
    recvs: list[Message],
    table: bytes = NO_DIGEST.table,
) -> tuple[list[dist.Work], list[AwaitedHeader]]:
    """Post messages on gloo with headers, receives first.

    Returns the works of messages, and the headers; wait for the headers first. Peers are ranks of
    the group. `numbers` has the number of the exchange's call with each peer, and `table` is the
    table of the digest of the call's arguments.
    """
    # Headers go both ways even if messages do not: two ranks that only send would wait for each
    # other without seeing the other's call.
    by_peer: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
    for direction, messages in enumerate((sends, recvs)):
        for peer, tensor in messages:
            by_peer.setdefault(peer, ([], []))[direction].append(tensor)
    works, awaited, outgoing = [], [], []
    for peer, (sent, received) in by_peer.items():
        named, data = exchange._replace(call=numbers[peer]), bytearray(_HEADER_BYTES)
        sends_listed, recvs_listed = listed(sent), listed(received)
        theirs = Header(named, recvs_listed, sends_listed, table)
        work = group.recv([_as_tensor(data)], peer, _FIRST_HEADER_TAG + exchange.hop)
        awaited.append(AwaitedHeader(peer, work, theirs.data, data))
        works += [group.recv([x], peer, theirs.tag(i)) for i, x in enumerate(received)]
        outgoing.append((peer, Header(named, sends_listed, recvs_listed, table), sent))
    for peer, ours, sent in outgoing:
        works.append(group.send([_as_tensor(ours.data)], peer, _FIRST_HEADER_TAG + exchange.hop))
        works += [group.send([x], peer, ours.tag(i)) for i, x in enumerate(sent)]
    return works, awaited


def disagreement_of(
    headers: list[AwaitedHeader], names: Sequence[str], rank: int, digest: CallDigest
) -> str | None:
    """Wait for headers; return a description of the first that is not as expected, or None.

    `names` has the group's ranks as errors name them, and `rank` is this rank. `digest` belongs to
    this rank's arguments.
    """
    for awaited in headers:
        awaited.work.wait()
        if awaited.received != awaited.expected:
            return disagreement(awaited, names[awaited.peer], names[rank], digest)
    return None


def disagreement(
    header: AwaitedHeader, peer: str, rank: str, digest: CallDigest = NO_DIGEST
) -> str:
    """Return a description of how a header differs from the expected one.

    `peer` and `rank` are the names of the peer and of this rank in errors. `digest` belongs to this
    rank's arguments.
    """
    theirs, their_sends, their_recvs = _fields(header.received)
    ours, our_recvs, our_sends = _fields(header.expected)
    table = bytes(header.received[_CHECKSUM_BYTES:_TEXT])
    arguments = digest.differing(table) if _call_of(theirs) == _call_of(ours) else []
    if theirs != ours:
        if _call_of(theirs) == _call_of(ours) and (_CHECK in theirs) != (_CHECK in ours):
            arguments = ["check_ranks"]
        rule = "all ranks must make the same calls, and run their backwards, in the same order"
        same = f"; {' and '.join(arguments)} must be the same on all ranks" if arguments else ""
        return f"{peer} is in {theirs}, while {rank} is in {ours}: {rule}{same}"
    if arguments:
        values = " and ".join(shown(digest.arguments[name]) for name in arguments)
        return (
            f"{' and '.join(arguments)} must be the same on all ranks: {peer} and {rank} differ in "
            f"{ours}, and {rank} has {values}. check_ranks=True shows what each rank has"
        )
    return (
        f"{peer} and {rank} are in {ours}, but {peer} sends {their_sends} and receives "
        f"{their_recvs}, while {rank} receives {our_recvs} and sends {our_sends}: did all ranks "
        "make the same call? check_ranks=True finds out"
    )


def _fields(header: bytearray) -> list[str]:
    """Return the exchange's name and the lists of sent and received messages, unless cut off."""
    text = header[_TEXT:].decode(errors="replace").replace("torch.", "").rstrip()
    fields = [*text.split("|"), "…", "…"]
    return [fields[0], *(f"({x})" if x else "nothing" for x in fields[1:3])]


def _call_of(name: str) -> str:
    """Return the call in an exchange's name, such as "call 7"."""
    return name.split(",")[0]


def _as_tensor(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)

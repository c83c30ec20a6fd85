"""Send headers, so that a rank never takes a message of one call for a message of another call.

An exchange has a name: the number of its call, its strategy with "forward" or "backward", and its
step. On gloo, a rank sends a *header* to each peer of an exchange, even if the rank only receives
messages from the peer. The header contains the name of the exchange, a digest of the call's
arguments, and the sizes and dtypes of the messages in both directions.

A rank may make calls in which it exchanges no messages with some peer, and the peer may skip these
calls. Examples are a local check, a recomputation, and a batch of which the peer has no tokens. Two
ranks therefore count only the calls in which they exchange messages with each other. Both ranks
make these calls in the same order.

A digest is a table with 2 bytes for each argument, padded to the same size in all calls. The digest
is computed once for each layout and set of options, from the description that `check_ranks`
compares.

Headers between two ranks are matched by their order, because all of them have the same tag, except
for headers of relayed messages. If two ranks are in different exchanges, or have different
arguments, each rank receives a header that it does not expect. The tag of a message is computed
from the header of its sender, so a message is never received into the buffer for a different
message. Without headers, a rank could compute with a wrong message, and gloo would abort the
process if the sizes of two messages differed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from seqpar.comm.faults.witness import CHECK_HINT
from seqpar.core.arguments import shown

Message = tuple[int, Tensor]  # (peer, tensor)
DIGEST_BYTES, _ENTRY_BYTES = 64, 2
_MAX_PARTS = 3  # an error shows at most this number of parts of a value
_MAX_VALUE_CHARACTERS = 201  # an error shows at most this number of characters of a value
_MAX_COMPARED_BYTES = 2**16  # larger tensors are not compared
_HEADER_BYTES = 256  # longer headers are cut, but the checksum covers the whole text
_CHECKSUM_BYTES = 8  # hexadecimal digits; the table and the text follow
_TEXT = _CHECKSUM_BYTES + DIGEST_BYTES  # the offset of the text in a header
_CHECK = "rank check"  # the label of exchanges in which ranks compare a call
# The tag of the headers of first hops. The headers of hop n use this tag plus n, because the thread
# that relays posts later hops, and the main thread may already have posted first hops of later
# exchanges.
_FIRST_HEADER_TAG = 0x5EA
_FIRST_MESSAGE_TAG = 1 << 30  # large, because users' tags are usually small


class CallNumbers:
    """The numbers of one call: for each peer, how many calls have exchanged messages with this
    peer.
    """

    def __init__(self, calls: list[int], rank: int, numbers: Tensor | None = None) -> None:
        """Count a new call, or restore the numbers of an earlier call.

        Args:
            calls: the counts of earlier calls. `calls[rank]` counts all calls of this rank.
                `calls[peer]` counts the calls in which this rank exchanged messages with the peer.
                A new call changes the counts.
            rank: this rank in the process group.
            numbers: the numbers to restore, as `as_tensor` returned them, or None for a new call.
        """
        self._calls = calls
        if numbers is None:
            calls[rank] += 1
            self._numbers = [0] * len(calls)
            self._numbers[rank] = calls[rank]
        else:
            self._numbers = numbers.view(torch.int64).tolist()
        # The number of calls that this rank has made, including this one. It is 0 outside calls.
        self.own = self._numbers[rank]

    def between(self, peer: int) -> int:
        """Return the number of the call between this rank and a peer.

        The call is counted when this method is first called for the peer.
        """
        if not self.own:
            return 0
        if not self._numbers[peer]:
            self._calls[peer] += 1
            self._numbers[peer] = self._calls[peer]
        return self._numbers[peer]

    def as_tensor(self) -> Tensor:
        """Return the numbers of a call as the bits of a float64 tensor, (ranks,) on the CPU.

        As floats, the numbers are below 1e-300. `torch.library.opcheck` requires that the results
        of two equal calls agree, and the numbers of two calls differ by less than any tolerance.
        """
        # Integers, or the shape of an empty tensor, would differ between two equal calls. A table
        # in Python could not distinguish two calls whose backwards run in any order. A tensor that
        # the operator returns survives hooks that copy tensors, selective checkpoints and compiled
        # graphs. `from_numpy` takes a quarter of the time of `torch.tensor`.
        return torch.from_numpy(np.array(self._numbers, dtype=np.int64).view(np.float64))


def empty_numbers(ranks: int) -> Tensor:
    """Return an uninitialised tensor with the shape and dtype of `CallNumbers.as_tensor`, for
    torch.compile.
    """
    return torch.empty(ranks, dtype=torch.float64, device="cpu")


OUTSIDE = CallNumbers([0], 0, torch.zeros(1, dtype=torch.int64, device="cpu"))


class CallDigest(NamedTuple):
    table: bytes  # DIGEST_BYTES: an entry for the names, and one for each argument
    arguments: Mapping[str, object]  # this rank's arguments, by argument name

    @classmethod
    def of(cls, arguments: Mapping[str, object]) -> CallDigest:
        entries = [list(arguments), *arguments.values()]
        table = b"".join([_entry(json.dumps(value)) for value in entries])
        assert len(table) <= DIGEST_BYTES, f"{len(arguments)} arguments are too many"
        return cls(table.ljust(DIGEST_BYTES, b"\0"), arguments)

    def extended(self, **values: Tensor | None) -> CallDigest:
        """Return a digest that also depends on the values of small tensors, by argument name.

        Only tensors on the CPU are read. Reading a tensor on a GPU would wait for the GPU.
        """
        contents = [None if x is None else _content_of(x) for x in values.values()]
        if not any(contents):
            return self
        names, pairs = list(self.arguments), zip(values, contents, strict=True)
        entries = tuple([(names.index(name), *x) for name, x in pairs if x is not None])
        return self._replace(table=_extended(self.table, entries))

    def differing(self, table: bytes) -> list[str]:
        """Return the arguments that differ between this rank and a peer, given the peer's table.

        The result is empty if the two ranks have different argument names.
        """
        if _at(table, 0) != _at(self.table, 0):
            return []
        return [
            name for i, name in enumerate(self.arguments, 1) if _at(table, i) != _at(self.table, i)
        ]


def _content_of(x: Tensor) -> tuple[int, torch.dtype] | None:
    """Return a checksum and the dtype of a small tensor on the CPU. Return None for a large tensor
    and for a tensor on a GPU.
    """
    if not x.is_cpu or x.nbytes > _MAX_COMPARED_BYTES:
        return None
    data: Any = x.detach().contiguous()
    if x.dtype is torch.bfloat16:  # numpy has no bfloat16
        data = data.view(torch.int16)
    return crc32(data.numpy()), x.dtype


@lru_cache(256)
def _extended(table: bytes, entries: tuple[tuple[int, int, torch.dtype], ...]) -> bytes:
    """Return a table in which the entries of some arguments also depend on tensor values.

    `entries` has (index of the argument, checksum, dtype) for each argument with a tensor.
    """
    changed = bytearray(table)
    for number, checksum, dtype in entries:
        start = (1 + number) * _ENTRY_BYTES
        text = f"{_at(table, 1 + number).hex()} {checksum} {dtype}"
        changed[start : start + _ENTRY_BYTES] = _entry(text)
    return bytes(changed)


def _at(table: bytes, index: int) -> bytes:
    return table[index * _ENTRY_BYTES : (index + 1) * _ENTRY_BYTES]


def _entry(text: str) -> bytes:
    return crc32(text.encode()).to_bytes(4)[-_ENTRY_BYTES:]


NO_DIGEST = CallDigest(bytes(DIGEST_BYTES), {})
"""The digest of messages outside calls, which have no arguments to compare."""


class Exchange(NamedTuple):
    call: int  # the number of its call, or 0 outside calls
    label: str  # the strategy and the pass, such as "ring backward"
    step: int  # the step of the strategy that needs the messages
    hop: int = 0  # for relayed messages (`relays.py`), how many hops came before

    def __str__(self) -> str:
        hop = f", hop {self.hop}" if self.hop else ""
        return f"call {self.call}, step {self.step} of {self.label}{hop}"


class Header:
    """A rank's description of the messages that it exchanges with one peer."""

    def __init__(
        self, exchange: Exchange, sends: str, recvs: str, table: bytes = NO_DIGEST.table
    ) -> None:
        """`sends` and `recvs` list the messages in each direction, as texts from `listed`. `table`
        is the table of the digest of the call's arguments.
        """
        text = table + f"{exchange}|{sends}|{recvs}".encode()
        self._checksum = crc32(text)
        self.data = bytearray(
            (b"%08x%b" % (self._checksum, text))[:_HEADER_BYTES].ljust(_HEADER_BYTES)
        )

    def tag(self, index: int) -> int:
        return _FIRST_MESSAGE_TAG + (self._checksum + index) % _FIRST_MESSAGE_TAG


def listed(tensors: Sequence[Tensor]) -> str:
    return ", ".join([f"{x.numel()} {x.dtype}" for x in tensors])


class AwaitedHeader(NamedTuple):
    peer: int
    work: dist.Work
    expected: bytearray
    received: bytearray  # the buffer, which may be read when `work` is done


def post(
    group: ProcessGroup,
    exchange: Exchange,
    numbers: Mapping[int, int],
    sends: list[Message],
    recvs: list[Message],
    table: bytes = NO_DIGEST.table,
) -> tuple[list[dist.Work], list[AwaitedHeader]]:
    """Post messages on gloo, with a header for each peer. Receives are posted before sends.

    A header names the call, the exchange and the sizes of messages, so that a rank notices if a
    peer makes a different call. The caller must wait for the returned headers before it waits for
    the messages.

    Args:
        group: the process group.
        exchange: the name of the exchange.
        numbers: for each peer, the number of the call between the two ranks.
        sends, recvs: the messages as (peer, tensor). Peers are ranks of the process group.
        table: the digest of the call's arguments, as a table for headers.

    Returns:
        The handles of the messages, and the headers of peers.
    """
    # Headers are sent in both directions, even if all messages have one direction. Otherwise, two
    # ranks that both send messages to each other would both wait, and neither would learn which
    # call the other makes.
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


def disagreement(
    header: AwaitedHeader, peer: str, rank: str, digest: CallDigest = NO_DIGEST
) -> str:
    """Return a text that says how a header differs from the expected header.

    `peer` and `rank` are the names of the peer and of this rank in errors. `digest` is the digest
    of this rank's arguments.
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
        texts = {name: in_words(digest.arguments[name]) for name in arguments}
        values = "; ".join(
            f"{name}: {text}" if len(texts) > 1 else text for name, text in texts.items()
        )
        return (
            f"{' and '.join(arguments)} must be the same on all ranks: {peer} and {rank} differ in "
            f"{ours}, and {rank} has {values}. check_ranks=True shows what each rank has"
            f"{hint_at(arguments)}"
        )
    return (
        f"{peer} and {rank} are in {ours}, but {peer} sends {their_sends} and receives "
        f"{their_recvs}, while {rank} receives {our_recvs} and sends {our_sends}: did all ranks "
        f"make the same call? {CHECK_HINT}"
    )


def in_words(value: object) -> str:
    """Return the value of an argument as a text for errors.

    A dictionary may have an entry "digest", which is a digest of all entries.
    """
    if isinstance(value, dict):
        parts = [str(text) for name, text in value.items() if name != "digest"]
        return ", ".join(parts[:_MAX_PARTS]) if parts else str(value["digest"])
    text = value if isinstance(value, str) else shown(value)
    return text[:_MAX_VALUE_CHARACTERS]


def hint_at(arguments: Collection[str]) -> str:
    """Return the usual reason why these arguments differ between ranks, as the end of an error."""
    if "layout" not in arguments:
        return ""
    return ". All ranks of a group need one batch: does each sampler draw a different batch?"


def _fields(header: bytearray) -> list[str]:
    """Return three texts: the name of the exchange, the list of sent messages, and the list of
    received messages.

    If the header was cut, a missing list is replaced by "(…)".
    """
    text = header[_TEXT:].decode(errors="replace").replace("torch.", "").rstrip()
    fields = [*text.split("|"), "…", "…"]
    return [fields[0], *(f"({x})" if x else "nothing" for x in fields[1:3])]


def _call_of(name: str) -> str:
    return name.split(",")[0]


def _as_tensor(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)

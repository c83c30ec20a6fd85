"""The control messages between a pool and a server.

A message has three parts: 12 bytes with magic, version, number of following frames and checksum;
16 bytes with the session's secret; one of the structs below as MessagePack. Tensors follow in
separate frames or through another transport. Decoding checks types and bounds, and cannot run code.

The class name of a message is its tag on the wire, unless the class gives another one.
"""

from __future__ import annotations

import struct
import zlib
from importlib import import_module
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from seqpar.servers.wire.limits import MAX_CONTROL_BYTES, MAX_FRAMES

MAGIC = b"SQPR"
VERSION = 2
SECRET_BYTES = 16
_PREFIX = struct.Struct("<4sHHI")  # magic, version, frames that follow, and a checksum
_NO_SESSION = bytes(SECRET_BYTES)

Count = Annotated[int, Meta(ge=0, le=2**62)]
Position = Annotated[int, Meta(ge=-(2**62), le=2**62)]
Name = Annotated[str, Meta(max_length=256)]
Blob = Annotated[bytes, Meta(max_length=2**14)]
Secret = Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
Operation = Literal["forward", "backward"]
DtypeName = Literal["float64", "float32", "bfloat16", "float16"]
TransportName = Literal["zmq", "nixl"]


def library_version() -> str:
    version: str = import_module("seqpar").__version__  # it imports this module
    return version


class ProtocolError(ValueError):
    """Data that arrived is not a message of this protocol."""


class VersionMismatch(ProtocolError):
    """A message of another version of the protocol arrived."""

    def __init__(self, theirs: int) -> None:
        super().__init__(f"version: this side speaks {VERSION} of the protocol, the peer {theirs}")
        self.theirs = theirs


class Message(Struct, tag=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """The base of all control messages."""


class LeaseMessage(Message, frozen=True):
    """The base of messages that belong to a lease."""

    generation: Count


class RequestMessage(LeaseMessage, frozen=True):
    """The base of messages about one request."""

    request: Count  # used once per generation, so a repeated message is refused


class Hello(Message, frozen=True):
    """A client asks for a lease and lists what it supports, preferred transports first."""

    library: Name
    client: Name
    transports: Annotated[list[TransportName], Meta(max_length=8)]
    dtypes: Annotated[list[DtypeName], Meta(max_length=8)]
    arena: Count = 0  # bytes that the server may write to directly
    offer: Blob = b""  # the address of its agent
    base: Count = 0  # the address of its arena


class Welcome(Message, frozen=True):
    """A server grants a lease; later messages carry its generation and its secret."""

    generation: Count
    secret: Secret
    library: Name
    device: Name
    dtypes: list[DtypeName]
    transport: TransportName
    credits: Count
    tokens: Count
    bytes: Count
    idle: float
    cache_room: Count
    arena: Count = 0
    offer: Blob = b""
    base: Count = 0


class Refused(Message, frozen=True):
    """A server refuses a lease."""

    reason: Name


class Ping(LeaseMessage, frozen=True):
    """A client is alive. On a second connection of the same key, no payload delays this message."""


class Pong(LeaseMessage, frozen=True):
    """A server is alive, has this many waiting requests and this many free bytes for caches."""

    waiting: Count
    cache_room: Count


class Task(RequestMessage, frozen=True):
    """A client asks for attention of query rows over key rows, or for its backward pass."""

    op: Operation
    dtype: DtypeName
    batch: Count
    q_rows: Count
    k_rows: Count
    heads: Count
    kv_heads: Count
    dim: Count
    value_dim: Count
    slices: Count
    scale: float
    softcap: float
    deterministic: bool
    exact_out: bool
    has_dlse: bool
    checksum: Count
    place: Count | None = None  # the payload's offset in the server's arena; None for frames
    result_place: Count | None = None  # the offset in the client's arena for the result
    # Seconds for which the client looks for direct writes; later it needs a Knock.
    watching: float = 0.0


class StepRequest(RequestMessage, tag="Step", frozen=True):
    """A client appends rows to a cache and asks for attention over all of its rows.

    The server keeps the first `start` rows and appends the payload's `k_rows` rows. A query at
    position i attends to rows i − left … i + right. The first step of a cache has `start` and
    `writes` 0.
    """

    cache: Count  # the client's number for the cache; a lease has its own numbers
    writes: Count  # earlier steps of the cache; if the server's cache differs, the answer is Lost
    start: Count
    offset: Position  # of the first query; the cache's first row has position 0
    left: Count
    right: Count
    dtype: DtypeName
    batch: Count
    q_rows: Count
    k_rows: Count
    heads: Count
    kv_heads: Count
    dim: Count
    value_dim: Count
    scale: float
    softcap: float
    checksum: Count
    place: Count | None = None
    result_place: Count | None = None
    watching: float = 0.0


class Lost(RequestMessage, frozen=True):
    """A server does not have the cache that a step continues; it must be built again."""


class Free(LeaseMessage, frozen=True):
    """A client no longer needs a cache."""

    cache: Count


class Result(RequestMessage, frozen=True):
    """A server has computed a request in `seconds`; `watching` means the same as in a Task."""

    checksum: Count
    seconds: float
    watching: float = 0.0


class Knock(Message, frozen=True):
    """A direct write has arrived at the receiver, or is under way and may need its help."""

    under_way: bool = False


class Failed(RequestMessage, frozen=True):
    """A server could not compute a request; another server might."""

    reason: Name


class Busy(RequestMessage, frozen=True):
    """A server is full; the client may ask again after `after` seconds."""

    after: float


class Cancel(RequestMessage, frozen=True):
    """A client no longer needs a request."""


class Stale(LeaseMessage, frozen=True):
    """A server does not know this lease; the client may ask for another one."""


class Malformed(Message, frozen=True):
    """A server received data that is not a message."""

    reason: Name


class Draining(LeaseMessage, frozen=True):
    """A server is about to leave: it answers accepted requests and accepts no others."""


class Goodbye(LeaseMessage, frozen=True):
    """A client leaves."""


class StatusRequest(Message, frozen=True):
    """Asks for a Status; needs no lease."""


class Status(Message, frozen=True):
    """A server's numbers, which `server/counters.py` explains. Totals count since its start."""

    library: Name
    device: Name
    transports: list[TransportName]
    seconds: float
    clients: Count
    waiting: Count
    tasks: Count
    tokens: Count
    bytes: Count
    refused: Count
    busy_seconds: float
    batches: Count
    caches: Count
    cache_bytes: Count
    draining: bool


AnyMessage = (
    Hello | Welcome | Refused | Ping | Pong | Task | StepRequest | Lost | Free | Result | Knock
    | Failed | Busy | Cancel | Stale | Malformed | Draining | Goodbye | StatusRequest | Status
)  # fmt: skip
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message, session: bytes = _NO_SESSION) -> bytes:
    """Encode a message with its session's secret."""
    return _framed(session + _ENCODER.encode(message), 0)


def _framed(body: bytes, frames: int) -> bytes:
    return _PREFIX.pack(MAGIC, VERSION, frames, zlib.crc32(body, frames)) + body


def followed(data: bytes, frames: int) -> bytes:
    """Return an encoded message with the number of frames that follow it."""
    return _framed(data[_PREFIX.size :], frames)


def session_of(data: bytes | memoryview) -> bytes:
    return bytes(data[_PREFIX.size : _PREFIX.size + SECRET_BYTES])


def frames_after(data: bytes | memoryview) -> int:
    """Return how many frames follow an encoded message; 0 for another version."""
    if len(data) < _PREFIX.size:
        return 0
    magic, version, frames, _ = _PREFIX.unpack_from(data)
    return int(frames) if (magic, version) == (MAGIC, VERSION) and frames < MAX_FRAMES else 0


# The texts of messages that reach terminals, logs and reports.
_TEXTS: dict[type[Message], list[str]] = {
    kind: [field.name for field in msgspec.structs.fields(kind) if field.type == Name]
    for kind in get_args(AnyMessage)
}


def printable(text: str) -> str:
    """Escape characters of a peer's text that could change a terminal or forge a log line."""
    if text.isprintable():
        return text
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)


def _printable(message: Message) -> Message:
    texts = {name: getattr(message, name) for name in _TEXTS[type(message)]}
    changed = {name: printable(x) for name, x in texts.items() if not x.isprintable()}
    return msgspec.structs.replace(message, **changed) if changed else message


def decode(data: bytes | memoryview) -> Message:
    """Decode a message, or raise a ProtocolError. The error never shows the bytes."""
    size = len(data)
    if not _PREFIX.size < size <= MAX_CONTROL_BYTES:
        limits = f"{_PREFIX.size + 1} to {MAX_CONTROL_BYTES}"
        raise ProtocolError(f"message: its length must be {limits} bytes, got {size}")
    magic, version, frames, checksum = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError("magic: this is no message of seqpar")
    if version != VERSION:
        raise VersionMismatch(version)
    checked = data[_PREFIX.size :]
    if zlib.crc32(checked, frames) != checksum:
        raise ProtocolError("checksum: the message was damaged on its way")
    body = checked[SECRET_BYTES:]
    if not len(body):
        raise ProtocolError("message: its length leaves no room for a body")
    try:
        return _printable(_DECODER.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        where = str(error).partition(" - at `")[2].rstrip("`") or "message"
        raise ProtocolError(f"{where}: not of the type that the protocol says") from None

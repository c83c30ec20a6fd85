"""The control messages between a pool and a server: typed, versioned, and checked when read.

A message is 12 bytes with magic, version, the number of frames that follow and a checksum;
then the 16 bytes of the session's secret, and MessagePack of one of the
structs below. What a message is about, as a task's tensors, comes behind it in
frames of its own, or through another transport. Nothing that is read here can run code.
"""

from __future__ import annotations

import struct
import zlib
from importlib import import_module
from typing import Annotated, Literal

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
    """Return seqpar's version."""
    version: str = import_module("seqpar").__version__  # it imports this module
    return version


class ProtocolError(ValueError):
    """What arrived is no message of this protocol."""


class VersionMismatch(ProtocolError):
    """A message of another version of the protocol arrived."""

    def __init__(self, theirs: int) -> None:
        super().__init__(f"version: this side speaks {VERSION} of the protocol, the peer {theirs}")
        self.theirs = theirs


class Message(Struct, tag=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """What all control messages are."""


class Hello(Message, frozen=True):
    """A client asks for a lease, and says what it speaks, the transports it prefers first."""

    library: Name
    client: Name
    transports: Annotated[list[TransportName], Meta(max_length=8)]
    dtypes: Annotated[list[DtypeName], Meta(max_length=8)]
    arena: Count = 0  # bytes that it can take by one-sided writes
    offer: Blob = b""  # how one-sided writes reach it
    base: Count = 0  # where its arena is


class Welcome(Message, frozen=True):
    """A server grants a lease, with the generation and the secret that later messages carry."""

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
    """A server grants no lease."""

    reason: Name


class Ping(Message, frozen=True):
    """A client lives.

    It may come on a second connection of the session's key, where it and its answer pass payloads.
    """

    generation: Count


class Pong(Message, frozen=True):
    """A server lives; so many requests wait there, and caches may have so many bytes more."""

    generation: Count
    waiting: Count
    cache_room: Count


class Task(Message, frozen=True):
    """A client asks for attention, forward or backward, of query rows over key rows.

    `request` is used once within a generation, so a message that is sent again is refused. `place`
    is where in the server's arena the payload is, and `result_place` where in the client's the
    result belongs; a payload in frames has None. For `watching` seconds the client looks for what
    is written to it; later it must be woken by a Knock.
    """

    generation: Count
    request: Count
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
    place: Count | None = None
    result_place: Count | None = None
    watching: float = 0.0


class StepRequest(Message, tag="Step", frozen=True):
    """A client has new rows of keys and values kept, and asks for attention over the cache's.

    A cache is what a lease holds under a number that its client has chosen, after so many `writes`
    to it. Its first `start` rows are kept, and the payload's `k_rows` put behind them. The first of
    `q_rows` queries is at position `offset`, the cache's first row at 0; a query at i sees the rows
    i − left … i + right. The first step of a cache has `start` and `writes` 0. Else, what it does
    not find as it says is Lost. The other fields are as a Task's.
    """

    generation: Count
    request: Count
    cache: Count
    writes: Count
    start: Count
    offset: Position
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


class Lost(Message, frozen=True):
    """A server has no such cache as a step continues: it must be built again, anywhere."""

    generation: Count
    request: Count


class Free(Message, frozen=True):
    """A client no longer needs a cache."""

    generation: Count
    cache: Count


class Result(Message, frozen=True):
    """A server has computed a request, in so many seconds of its own; `watching` is as a task's."""

    generation: Count
    request: Count
    checksum: Count
    seconds: float
    watching: float = 0.0


class Knock(Message, frozen=True):
    """Something was written to the receiver with its message, or is under way, and may need it."""

    under_way: bool = False


class Failed(Message, frozen=True):
    """A server has not computed a request; another one may."""

    generation: Count
    request: Count
    reason: Name


class Busy(Message, frozen=True):
    """A server is full, and may be asked again after so many seconds."""

    generation: Count
    request: Count
    after: float


class Cancel(Message, frozen=True):
    """A client no longer needs a request."""

    generation: Count
    request: Count


class Stale(Message, frozen=True):
    """A server knows no such lease; the client may ask for another."""

    generation: Count


class Malformed(Message, frozen=True):
    """What a server received is no message."""

    reason: Name


class Draining(Message, frozen=True):
    """A server is about to leave: it answers what it has, and takes nothing more."""

    generation: Count


class Goodbye(Message, frozen=True):
    """A client leaves."""

    generation: Count


class StatusRequest(Message, frozen=True):
    """Someone asks how a server does."""


class Status(Message, frozen=True):
    """How a server does; seconds are those of the server's clock, counts are since its start."""

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
    """Return a message as bytes, with the secret of the session that it belongs to."""
    return _framed(session + _ENCODER.encode(message), 0)


def _framed(rest: bytes, frames: int) -> bytes:
    return _PREFIX.pack(MAGIC, VERSION, frames, zlib.crc32(rest, frames)) + rest


def followed(data: bytes, frames: int) -> bytes:
    """Return an encoded message that says how many frames follow it."""
    return _framed(data[_PREFIX.size :], frames)


def session_of(data: bytes | memoryview) -> bytes:
    """Return the session's secret that an encoded message carries."""
    return bytes(data[_PREFIX.size : _PREFIX.size + SECRET_BYTES])


def frames_after(data: bytes | memoryview) -> int:
    """Return how many frames follow an encoded message; 0 if it is of another version."""
    if len(data) < _PREFIX.size:
        return 0
    magic, version, frames, _ = _PREFIX.unpack_from(data)
    return int(frames) if (magic, version) == (MAGIC, VERSION) and frames < MAX_FRAMES else 0


# The texts of messages that reach terminals, logs and reports, by the message's type.
_TEXTS: dict[type[Message], tuple[str, ...]] = {
    Hello: ("library", "client"),
    Welcome: ("library", "device"),
    Refused: ("reason",),
    Failed: ("reason",),
    Malformed: ("reason",),
    Status: ("library", "device"),
}


def printable(text: str) -> str:
    """Return a peer's text with escapes in place of what could change a terminal or a log."""
    if text.isprintable():
        return text
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)


def _printable(message: Message) -> Message:
    """Return a message whose texts are printable."""
    texts = {name: getattr(message, name) for name in _TEXTS.get(type(message), ())}
    changed = {name: printable(x) for name, x in texts.items() if not x.isprintable()}
    return msgspec.structs.replace(message, **changed) if changed else message


def decode(data: bytes | memoryview) -> Message:
    """Return the message that these bytes are, or raise a ProtocolError that says what is wrong.

    The error never shows what the bytes were.
    """
    size = len(data)
    if not _PREFIX.size < size <= MAX_CONTROL_BYTES:
        limits = f"{_PREFIX.size + 1} to {MAX_CONTROL_BYTES}"
        raise ProtocolError(f"message: its length must be {limits} bytes, got {size}")
    magic, version, frames, checksum = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError("magic: this is no message of seqpar")
    if version != VERSION:
        raise VersionMismatch(version)
    rest = data[_PREFIX.size :]
    if zlib.crc32(rest, frames) != checksum:
        raise ProtocolError("checksum: the message was damaged on its way")
    body = rest[SECRET_BYTES:]
    if not len(body):
        raise ProtocolError("message: its length leaves no room for a body")
    try:
        return _printable(_DECODER.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        where = str(error).partition(" - at `")[2].rstrip("`") or "message"
        raise ProtocolError(f"{where}: not of the type that the protocol says") from None

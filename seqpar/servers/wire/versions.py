"""The versions of the gRPC service, and the encoding of the messages of each version.

A server offers the newest two versions, and a pool uses the newest version that its server offers.
Trainers and servers can therefore be updated one after another, in any order.

A `Version` encodes and decodes the messages of one protobuf package, such as `seqpar.attention.v1`.
For a new package, write a subclass that overrides the methods that have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from seqpar.servers.wire import attention_pb2
from seqpar.servers.wire.messages import Places, ReplyHeader, RequestHeader, Step, Task
from seqpar.servers.wire.payload import Buffer, RequestError, checksum, view_of

_DATA = 15 << 3 | 2  # protobuf's tag of the field `data`, before the length and the data
_MAX_LENGTH_BYTES = 5  # protobuf encodes a length below 4 GiB in at most 5 bytes
M = TypeVar("M", bound=Message)
_TASK_FIELDS = [name for name in Task.__dataclass_fields__ if name not in ("operation", "dtype")]


class Version:
    """One version of the service."""

    def __init__(self, messages: ModuleType | Any) -> None:
        """`messages` is the module that protobuf has generated for the version's package."""
        self.messages = messages
        self.service = f"{messages.DESCRIPTOR.package}.Attention"
        self._operations = _names(messages.Operation)
        self._dtypes = _names(messages.Dtype)

    # --- The messages of `Compute`, whose data is neither parsed nor copied ---

    def request(self, header: RequestHeader, data: Sequence[Buffer] = ()) -> bytes:
        """Encode the first request of a task."""
        message = self._unplaced(header)
        if header.places is not None:
            message.places.MergeFrom(self.messages.Places(**header.places._asdict()))
        message.checksum = header.checksum ^ digest(message)
        return joined(message.SerializeToString(), data)

    def checksum(self, header: RequestHeader) -> int:
        """Return the checksum that is sent with a request. A reply contains the checksum of the
        request that it answers.
        """
        return header.checksum ^ digest(self._unplaced(header))

    def _unplaced(self, header: RequestHeader) -> Any:
        message = self.messages.ComputeRequest(session=header.session, task=self.task(header.task))
        if header.step is not None:
            message.step.MergeFrom(self.messages.Step(**header.step._asdict()))
        return message

    def task(self, task: Task) -> Any:
        operation = self.messages.Operation.Value(task.operation.upper())
        dtype = self.messages.Dtype.Value(task.dtype.upper())
        fields = {name: getattr(task, name) for name in _TASK_FIELDS}
        return self.messages.Task(operation=operation, dtype=dtype, **fields)

    def read_request(self, raw: bytes) -> tuple[RequestHeader, Buffer]:
        """Decode the first request of a task, or raise a RequestError that names what is wrong."""
        message = self.read(self.messages.ComputeRequest, raw)
        if not message.HasField("task"):
            raise RequestError("task: the first request must have one")
        task = self.read_task(message.task)
        step = places = None
        if message.HasField("step"):
            step = Step(*(getattr(message.step, name) for name in Step._fields))
        if (step is not None) != (task.operation == "step"):
            raise RequestError("step: the operation STEP must have one, and no other may")
        if message.HasField("places"):
            places = Places(message.places.request, message.places.result)
        checksum = message.checksum ^ digest(message)
        return RequestHeader(message.session, task, step, checksum, places), message.data

    def read_task(self, message: Any) -> Task:
        operation, dtype = (
            names.get(number)
            for names, number in (
                (self._operations, message.operation),
                (self._dtypes, message.dtype),
            )
        )
        if operation is None or dtype is None:
            raise RequestError("operation, dtype: this server does not know them")
        fields = {name: getattr(message, name) for name in _TASK_FIELDS}
        task = Task(operation=operation, dtype=dtype, **fields)  # type: ignore[arg-type]
        if self.task(task).ByteSize() != message.ByteSize():
            raise RequestError("task: it has fields that this server does not know")
        return task

    def reply(self, header: ReplyHeader, data: Sequence[Buffer] = ()) -> bytes:
        """Encode the first reply to a task."""
        message = self.messages.ComputeReply(**header._asdict())
        return joined(message.SerializeToString(), data)

    def read_reply(self, raw: bytes) -> tuple[ReplyHeader, Buffer]:
        """Decode the first reply to a task, or raise a RequestError that names what is wrong."""
        message = self.read(self.messages.ComputeReply, raw)
        return ReplyHeader(message.checksum, message.seconds, message.open), message.data

    def read(self, kind: type[M], raw: bytes) -> M:
        """Decode a message, or raise a RequestError that names the kind of the message."""
        try:
            return kind.FromString(raw)
        except DecodeError:
            raise RequestError(f"{kind.DESCRIPTOR.name}: it cannot be decoded") from None


def digest(request: Any) -> int:
    """Return a hash of a request's task and step.

    The checksum of the request includes the hash, so that a damaged header is detected too.
    """
    parts = (x.SerializeToString(deterministic=True) for x in (request.task, request.step))
    return checksum(list(parts))


def _names(enum: Any) -> dict[int, str]:
    """Return the names of an enum's values in lower case, without the value 0 (unspecified)."""
    return {number: name.lower() for name, number in enum.items() if number}


VERSIONS: list[Version] = [Version(attention_pb2)]  # the newest first, at most two


# --- Data ---


def joined(head: bytes, data: Sequence[Buffer]) -> bytes:
    """Append the field `data` to an encoded message. This copies the data once."""
    size = sum(view_of(x).nbytes for x in data)
    views = map(view_of, data)
    return b"".join([head, bytes([_DATA]), _varint(size), *views]) if size else head


def data_of(raw: bytes) -> Buffer:
    """Return the data of a request or a reply that has only the field `data`, without a copy."""
    if not raw or raw[0] != _DATA:
        raise RequestError("data: a later message of a task has only data")
    size = 0
    for start in range(1, min(len(raw), _MAX_LENGTH_BYTES + 1)):
        size |= (raw[start] & 0x7F) << 7 * (start - 1)
        if raw[start] < 0x80:
            break
    else:
        raise RequestError("data: its length does not end")
    if not size or start + 1 + size != len(raw):
        raise RequestError("data: its length is wrong")
    return memoryview(raw)[start + 1 :]


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(0x80 | number & 0x7F)
        number >>= 7
    found.append(number)
    return bytes(found)

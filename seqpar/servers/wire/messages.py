"""The headers of requests and replies, in a form that does not depend on the service's version.

`versions.py` converts the headers to the messages of `attention.proto`, and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Operation = Literal["forward", "backward", "step"]
DtypeName = Literal["float64", "float32", "bfloat16", "float16"]
TransportName = Literal["grpc", "nixl"]


@dataclass(frozen=True, slots=True)
class Task:
    """The sizes of a request's tensors, and the options of its attention.

    If two tasks are equal, their payloads have the same sizes, and so do their results.
    """

    operation: Operation  # "step" for a decoding step
    dtype: DtypeName
    batch: int
    q_rows: int
    k_rows: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    slices: int  # the number of rectangles of query and key rows that form the mask; 0 for a step
    scale: float
    softcap: float
    deterministic: bool
    exact_out: bool
    has_dlse: bool


class Step(NamedTuple):
    """A decoding step: the rows that it appends to a cache, and the rows to which its queries
    attend.

    The server keeps the first `start` rows of the cache, and appends the `k_rows` rows of the
    payload. A query at position i attends to rows i − left … i + right. The first step of a cache
    has `start` = 0 and `writes` = 0.
    """

    cache: int  # a number that the client has chosen for the cache, unique in the session
    # The number of earlier steps of the cache, which the server compares with its own count.
    writes: int
    start: int
    offset: int  # the position of the first query; the cache's first row has position 0
    left: int
    right: int


class Places(NamedTuple):
    """The offsets in two arenas at which NIXL writes the payload and the result."""

    request: int  # the payload's offset in the server's arena
    result: int  # the result's offset in the client's arena


class RequestHeader(NamedTuple):
    """A task, or a step of a cache, without its payload."""

    session: bytes
    task: Task
    step: Step | None
    checksum: int  # the checksum of the payload
    places: Places | None = None


class ReplyHeader(NamedTuple):
    """A result, without the bytes of its tensors."""

    # The checksum of the result's tensors, XOR the one of the request (`Version.checksum`).
    checksum: int
    seconds: float  # the server's compute time
    open: bool  # whether the client can send another task in the same call

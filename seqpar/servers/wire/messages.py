"""What a pool asks of a server, independent of the version of the service.

`versions.py` converts these to the messages of `attention.proto` and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Operation = Literal["forward", "backward", "step"]
DtypeName = Literal["float64", "float32", "bfloat16", "float16"]
TransportName = Literal["grpc", "nixl"]


@dataclass(frozen=True, slots=True)
class Task:
    """The sizes of a task's tensors, and the options of its attention.

    Tasks that are equal have payloads and results of the same sizes.
    """

    operation: Operation  # a step appends rows to a cache, and attends to all of its rows
    dtype: DtypeName
    batch: int
    q_rows: int
    k_rows: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    slices: int  # rectangles of query rows and key rows, which are the mask; 0 for a step
    scale: float
    softcap: float
    deterministic: bool
    exact_out: bool
    has_dlse: bool


class Step(NamedTuple):
    """Which rows a step appends to a cache, and which rows its queries attend to.

    The server keeps the first `start` rows and appends the payload's `k_rows` rows. A query at
    position i attends to rows i − left … i + right. The first step of a cache has `start` and
    `writes` 0.
    """

    cache: int  # the client's number of the cache; each session has its own numbers
    writes: int  # earlier steps of the cache; if the server's cache differs, the cache is lost
    start: int
    offset: int  # of the first query; the cache's first row has position 0
    left: int
    right: int


class Places(NamedTuple):
    """Offsets in the arenas of server and client, if NIXL moves the payload and the result."""

    request: int
    result: int


class RequestHeader(NamedTuple):
    """A task, or a step of a cache, without its payload."""

    session: bytes
    task: Task
    step: Step | None
    checksum: int  # of the payload
    places: Places | None = None


class ReplyHeader(NamedTuple):
    """What precedes the tensors of a result."""

    checksum: int
    seconds: float  # of the computation
    open: bool  # whether the call may have another task

"""A check of an attention server: whether its results are right, and how fast it is.

The server and this process compute the same small task, and the results are compared. The check
then measures the round-trip time of this task, and the bandwidth for a larger payload without
computation.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from seqpar.layout.masks.mask import Slices
from seqpar.servers.pool.pool import ServerPool
from seqpar.servers.server.compute import compute
from seqpar.servers.wire.request import Request, ServersError
from seqpar.softmax.compute.call_options import CallOptions

_ROWS, _HEADS, _DIM = 512, 4, 64
_MEBIBYTES = 16  # the size of the payload that measures bandwidth
_TIMES = 5  # number of repetitions; the shortest time counts
# Allows for the rounding of a server's device, which can differ from the rounding of this CPU.
_TOLERANCE = 1e-4


class Finding(NamedTuple):
    """The result of a check of one server over one transport."""

    address: str
    transport: str
    error: str  # why the check failed, or ""
    # Whether the server's result has the same bits as this process's result.
    same_bits: bool = False
    seconds: float = 0.0  # the shortest of 5 round-trip times of the known task
    # The bytes of a payload without computation and of its result, divided by the shortest of 5
    # round-trip times.
    bytes_per_second: float = 0.0


def known_task() -> Request:
    """Return the task that a checked server computes: causal attention over one document."""
    generator = torch.Generator().manual_seed(0)
    shape = 1, _ROWS, _HEADS, _DIM
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    rows, band = np.array([[0, _ROWS]]), np.array([[-_ROWS, 0]])
    positions = np.arange(_ROWS, dtype=np.int32)
    slices = Slices(rows, rows, band, positions, positions, np.empty((0, 2), np.int64))
    return Request(q, k, v, slices, CallOptions(_DIM**-0.5, 0.0, "default", True))


def payload(mebibytes: int) -> Request:
    """Return a task in which no query attends to a key. Its q, k, v and out have `mebibytes` MiB
    together.
    """
    rows = mebibytes * 2**20 // 4 // 4 // (_HEADS * _DIM)  # fp32 q, k, v and out
    x = torch.zeros(1, rows, _HEADS, _DIM)
    none, positions = np.empty((0, 2), np.int64), np.arange(rows, dtype=np.int32)
    slices = Slices(none, none, none, positions, positions, none)
    return Request(x, x, x, slices, CallOptions(1.0, 0.0, "default", True))


def check(address: str, transport: str, keys: Path | None, timeout: float) -> Finding:
    """Check the server at `address` over one transport.

    The time limit is `timeout` seconds for connecting and 4·`timeout` seconds for a request. If the
    server fails, `check` raises no error, and the field `error` of the result contains the reason.
    """
    deadlines = {
        "connect": timeout, "request": 2 * timeout, "hedge": 3 * timeout, "give_up": 4 * timeout
    }  # fmt: skip
    try:
        pool = ServerPool.connect(
            address, keys=keys, transports=[transport], deadlines=deadlines, home=False
        )
    except ValueError as error:
        return Finding(address, transport, str(error))
    with pool:
        (server, _) = pool.report().servers
        if server.state != "ready":
            return Finding(address, transport, server.reason)
        if server.transport != transport:
            return Finding(address, transport, f"it offers only {server.transport}")
        try:
            return _compare(pool, address, transport)
        except ServersError as error:
            return Finding(address, transport, str(error))


def _compare(pool: ServerPool, address: str, transport: str) -> Finding:
    task, timed = known_task(), payload(_MEBIBYTES)
    seconds = _least_seconds(pool, task)
    rate = _MEBIBYTES * 2**20 / _least_seconds(pool, timed)
    results = pool.submit(task).result()
    pairs = list(zip(results, compute([task], torch.device("cpu"))[0], strict=True))
    same = all(torch.equal(x, y) for x, y in pairs)
    if not all(torch.allclose(x, y, atol=_TOLERANCE, rtol=0) for x, y in pairs):
        return Finding(address, transport, "its answer is wrong")
    return Finding(address, transport, "", same, seconds, rate)


def _least_seconds(pool: ServerPool, request: Request) -> float:
    times = []
    for _ in range(1 + _TIMES):
        start = time.perf_counter()
        pool.submit(request).result()
        times.append(time.perf_counter() - start)
    return min(times[1:])

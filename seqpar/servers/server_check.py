"""Check before first use that a server computes a known task right, and measure its speed."""

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
_MEBIBYTES = 16  # of the timed payload
_TIMES = 5
# A server on another device may round differently. So far, differences were in fp32's last place.
_TOLERANCE = 1e-4


class Finding(NamedTuple):
    """The result of a check of one server over one transport."""

    address: str
    transport: str
    error: str  # the fault, or ""
    same_bits: bool = False  # whether the answer has the same bits as this process's result
    seconds: float = 0.0  # round-trip time of the known task, the least of 5
    bytes_per_second: float = 0.0  # of a payload without work, there and back, the least time of 5


def known_task() -> Request:
    """Return the task that a check of a server computes: causal attention of one document."""
    generator = torch.Generator().manual_seed(0)
    shape = 1, _ROWS, _HEADS, _DIM
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    rows, band = np.array([[0, _ROWS]]), np.array([[-_ROWS, 0]])
    positions = np.arange(_ROWS, dtype=np.int32)
    slices = Slices(rows, rows, band, positions, positions, np.empty((0, 2), np.int64))
    return Request(q, k, v, slices, CallOptions(_DIM**-0.5, 0.0, "default", True))


def payload(mebibytes: int) -> Request:
    """Return a task without work: its inputs and its output together have `mebibytes` MiB."""
    rows = mebibytes * 2**20 // 4 // 4 // (_HEADS * _DIM)  # fp32 q, k, v and out
    x = torch.zeros(1, rows, _HEADS, _DIM)
    none, positions = np.empty((0, 2), np.int64), np.arange(rows, dtype=np.int32)
    slices = Slices(none, none, none, positions, positions, none)
    return Request(x, x, x, slices, CallOptions(1.0, 0.0, "default", True))


def check(address: str, transport: str, keys: Path | None, timeout: float) -> Finding:
    """Check a server, with `timeout` seconds for connecting and 4 times as many for a request."""
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
            return Finding(address, transport, f"it offers {server.transport} alone")
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
    """Return the least of 5 times, after one call that warms up."""
    times = []
    for _ in range(1 + _TIMES):
        start = time.perf_counter()
        pool.submit(request).result()
        times.append(time.perf_counter() - start)
    return min(times[1:])

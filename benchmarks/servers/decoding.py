"""Compare steps of decoding with keys and values on a server, and sent with each step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.servers.processes import DIM, DTYPE, HEADS, KV_HEADS, LIMIT, connect, servers
from seqpar import ServerCache
from seqpar.layout.masks.mask import Slices
from seqpar.servers.pool.pool import ServerPool
from seqpar.servers.wire.request import Request
from seqpar.softmax.compute.call_options import CallOptions

Row = dict[str, Any]
LENGTHS = 2**12, 2**16  # tokens of the sequence
STEPS = 10  # per round
_TOLERANCE = 1e-2  # for bf16 outputs, which are summed in different orders


def measure(transport: str, rounds: int, begin: Callable[[str], None]) -> list[Row]:
    """Return seconds and bytes of a step for each length, with held and with sent keys."""
    with servers(transport) as (server,), connect([server.address], transport) as pool:
        found = []
        for length in LENGTHS:
            begin(f"{transport}: steps against {length:,} tokens")
            found.append({"transport": transport, **compared(pool, length, rounds)})
        return found


def compared(pool: ServerPool, length: int, rounds: int) -> Row:
    """Return seconds and bytes of a step on one server, alternating between the two ways.

    Each step repeats the last token, which is dropped after it.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, tokens, heads, DIM, generator=generator).to(DTYPE)
        for tokens, heads in ((1, HEADS), (length, KV_HEADS), (length, KV_HEADS))
    )
    request = _request(q, k, v)
    ways: dict[str, Callable[[], Tensor]] = {"sent": lambda: _sent(pool, request)}
    with ServerCache(pool, length - 1) as cache:
        cache.put(0, k[:, :-1], v[:, :-1])

        def held() -> Tensor:
            cache.extend()
            out = cache.attend(0, q, k[:, -1:], v[:, -1:])
            cache.truncate(length - 1)
            assert isinstance(out, Tensor)
            return out

        ways["held"] = held
        first, second = (way() for way in ways.values())
        if not torch.allclose(first, second, atol=_TOLERANCE, rtol=_TOLERANCE):
            raise SystemExit("an answer is wrong: no times were measured")
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                start = time.perf_counter()
                for _ in range(STEPS):
                    way()
                seconds[name].append((time.perf_counter() - start) / STEPS)
    out = q.shape[2] * (DIM + 1) * 4
    row = {
        "sent": request.nbytes + q.nbytes + q.shape[2] * 4,
        "held": q.nbytes + k[:, -1].nbytes + v[:, -1].nbytes + out,
    }
    medians = {name: statistics.median(x) for name, x in seconds.items()}
    return {"length": length, "seconds": medians, "bytes": row, "rounds": seconds}


def _request(q: Tensor, k: Tensor, v: Tensor) -> Request:
    """Return the step as a task with its keys and values."""
    length = k.shape[1]
    rows = np.array([[0, 1]]), np.array([[0, length]]), np.array([[-length, 0]])
    positions = (np.array([length - 1], np.int32), np.arange(length, dtype=np.int32))
    slices = Slices(*rows, *positions, np.empty((0, 2), np.int64))
    return Request(q, k, v, slices, CallOptions(DIM**-0.5, 0.0, "default", True))


def _sent(pool: ServerPool, request: Request) -> Tensor:
    return pool.submit(request).result(LIMIT)[0]


def table(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        ms = [f"{1e3 * row['seconds'][way]:.2f}" for way in ("sent", "held")]
        sizes = [f"{row['bytes'][way]:,}" for way in ("sent", "held")]
        lines.append([row["transport"], f"{row['length']:,}", *ms, *sizes])
    head = ["transport", "tokens", "sent, ms", "held, ms", "sent, bytes", "held, bytes"]
    return harness.table(head, lines)

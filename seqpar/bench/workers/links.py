"""Preflight: how long messages between each two ranks take, before strategies are measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from seqpar.comm.launch import host_name
from seqpar.comm.messages.exchange import Comm

ROUNDS_OF = {"latency": 21, "rate": 5}
MESSAGE_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}  # in each direction
SLOW_RATIO = 2.0  # to the median pair; a slower pair is reported


def place(device: torch.device) -> dict[str, str]:
    """Return where this rank computes."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"host": host_name(), "device": name}


def rounds(ranks: int) -> list[list[tuple[int, int]]]:
    """Return all pairs, in rounds of pairs that have no rank in common: a tournament."""
    seats = [*range(ranks + ranks % 2)]
    found = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats, reversed(seats[len(seats) // 2 :]), strict=False)
        found.append(sorted((min(p), max(p)) for p in pairs if max(p) < ranks))
        seats.insert(1, seats.pop())
    return [pairs for pairs in found if pairs]


def measure(comm: Comm, device: torch.device) -> list[dict[str, Any]]:
    """Return what this rank found of pairs of which it is the lower: seconds, and bytes/s each way.

    The pairs of a round exchange at once, as ranks of a strategy do, so links that they share are
    shared here too.
    """
    found = []
    for pairs in rounds(comm.size):
        comm.all_gather(torch.zeros(1, device=comm.device), label="links")
        of_round = comm.call()
        for a, b in pairs:
            if comm.rank not in (a, b):
                continue
            peer = b if comm.rank == a else a
            latency = _seconds(of_round, peer, torch.zeros(1, device=device), ROUNDS_OF["latency"])
            message = torch.zeros(MESSAGE_BYTES[device.type], dtype=torch.uint8, device=device)
            seconds = _seconds(of_round, peer, message, ROUNDS_OF["rate"])
            if comm.rank == a:
                rate = message.nbytes / max(seconds, 1e-9)
                found.append({"ranks": [a, b], "latency": latency, "rate": rate})
    return found


def _seconds(comm: Comm, peer: int, message: torch.Tensor, count: int) -> float:
    """Return the median seconds of exchanging a message each way."""
    received, times = torch.empty_like(message), []

    def exchange() -> None:
        comm.exchange([(peer, message)], [(peer, received)], label="links").wait()
        comm.synchronize()

    exchange()
    for _ in range(count):
        times.append(_timed(exchange))
    return statistics.median(times)


def _timed(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def report(places: list[dict[str, str]], answers: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return all pairs, and which are slow beside others of their kind: on a host, or between."""
    pairs = sorted((x for answer in answers for x in answer), key=lambda x: x["ranks"])
    for pair in pairs:
        a, b = (places[rank]["host"] for rank in pair["ranks"])
        pair["between"] = "ranks of a host" if a == b else "hosts"
    return {"places": places, "pairs": pairs, "slow": [x for x in map(_slow(pairs), pairs) if x]}


def _slow(pairs: list[dict[str, Any]]) -> Callable[[dict[str, Any]], str | None]:
    def describe(pair: dict[str, Any]) -> str | None:
        others = [x for x in pairs if x["between"] == pair["between"]]
        latency, rate = (statistics.median(x[name] for x in others) for name in ("latency", "rate"))
        a, b = pair["ranks"]
        if pair["rate"] * SLOW_RATIO < rate:
            sizes = f"{pair['rate'] / 1e9:.2f} GB/s each way, the median is {rate / 1e9:.2f}"
            return f"ranks {a} and {b}: {sizes}"
        if pair["latency"] > SLOW_RATIO * latency:
            times = f"{pair['latency'] * 1e6:.0f} us, the median is {latency * 1e6:.0f}"
            return f"ranks {a} and {b}: {times}"
        return None

    return describe

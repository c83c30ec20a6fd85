"""Measure messages between all pairs of ranks, before strategies are measured."""

from __future__ import annotations

import socket
import statistics
from typing import NotRequired, TypedDict

import torch

from seqpar.comm.messages.comm import Comm
from seqpar.costs.profile.harness import median_time

ROUNDS_OF = {"latency": 21, "rate": 5}
MESSAGE_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}  # in each direction
SLOW_RATIO = 2.0  # a pair is reported if seconds / median seconds is above this


class RankPair(TypedDict):
    """Two ranks, the seconds of a small message, and bytes/s in each direction."""

    ranks: list[int]
    latency: float
    rate: float
    between: NotRequired[str]


class LinksReport(TypedDict):
    """The device of each rank, all pairs of ranks, and descriptions of slow pairs."""

    places: list[dict[str, str]]
    pairs: list[RankPair]
    slow: list[str]


def place(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"host": socket.gethostname(), "device": name}


def rounds(ranks: int) -> list[list[tuple[int, int]]]:
    """Divide all pairs of ranks into lists of pairs. In each list, every rank is in at most one
    pair.
    """
    seats = [*range(ranks + ranks % 2)]
    schedule = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats, reversed(seats[len(seats) // 2 :]), strict=False)
        schedule.append(sorted((min(p), max(p)) for p in pairs if max(p) < ranks))
        seats.insert(1, seats.pop())
    return [pairs for pairs in schedule if pairs]


def measure(comm: Comm, device: torch.device) -> list[RankPair]:
    """Measure messages between all pairs of ranks, and return the measurements of this rank.

    Of the two ranks in a pair, the rank with the lower number returns the measurement of the pair.

    The pairs are measured in rounds (`rounds`). In a round, each rank is in at most one pair, and
    all pairs exchange messages at the same time. The pairs therefore share the links of a machine,
    as ranks do when they compute attention.
    """
    measured: list[RankPair] = []
    for pairs in rounds(comm.size):
        comm.all_gather(torch.zeros(1, device=comm.device), label="links")
        call = comm.call()
        for a, b in pairs:
            if comm.rank not in (a, b):
                continue
            peer = b if comm.rank == a else a
            latency = _seconds(call, peer, torch.zeros(1, device=device), ROUNDS_OF["latency"])
            message = torch.zeros(MESSAGE_BYTES[device.type], dtype=torch.uint8, device=device)
            seconds = _seconds(call, peer, message, ROUNDS_OF["rate"])
            if comm.rank == a:
                rate = message.nbytes / max(seconds, 1e-9)
                measured.append({"ranks": [a, b], "latency": latency, "rate": rate})
    return measured


def _seconds(comm: Comm, peer: int, message: torch.Tensor, count: int) -> float:
    received = torch.empty_like(message)

    def exchange() -> None:
        comm.exchange([(peer, message)], [(peer, received)], label="links").wait()
        comm.synchronize()

    return median_time(exchange, count)


def report(places: list[dict[str, str]], answers: list[list[RankPair]]) -> LinksReport:
    """Return all pairs, and descriptions of pairs that are slower than similar pairs."""
    pairs = sorted((x for answer in answers for x in answer), key=lambda x: x["ranks"])
    for pair in pairs:
        a, b = (places[rank]["host"] for rank in pair["ranks"])
        pair["between"] = "ranks of a host" if a == b else "hosts"
    descriptions = (_why_slow(pair, pairs) for pair in pairs)
    return {"places": places, "pairs": pairs, "slow": [x for x in descriptions if x]}


def _why_slow(pair: RankPair, pairs: list[RankPair]) -> str | None:
    peers = [x for x in pairs if x["between"] == pair["between"]]
    latency = statistics.median(x["latency"] for x in peers)
    rate = statistics.median(x["rate"] for x in peers)
    a, b = pair["ranks"]
    if pair["rate"] * SLOW_RATIO < rate:
        rates = f"{pair['rate'] / 1e9:.2f} GB/s each way, the median is {rate / 1e9:.2f}"
        return f"ranks {a} and {b}: {rates}"
    if pair["latency"] > SLOW_RATIO * latency:
        latencies = f"{pair['latency'] * 1e6:.0f} us, the median is {latency * 1e6:.0f}"
        return f"ranks {a} and {b}: {latencies}"
    return None

"""Measure the share of a link's rate that the exchanges of `seqpar.comm` reach on gloo.

4 ranks on a mesh of links and on a switch (`emulated.py`) send patterns of messages. The ideal time
of a pattern is the busiest link's time at its nominal rate. Figures are fractions of that rate. TCP
over plain sockets, in the same rounds, shows the part that headers and the machine's load leave.
Each way is first checked: received messages must equal the sent ones.
"""

from __future__ import annotations

import functools
import itertools
import math
import socket
import statistics
import threading
import time
from argparse import Namespace
from collections import Counter, defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import harness
from benchmarks.network.emulated import Network, address
from seqpar.comm.messages.comm import Comm, Pending
from seqpar.comm.messages.message_header import Exchange, Message

RANKS, MIB, CHUNK, PORT = 4, 1 << 20, 1 << 20, 7000
SEAM, SOCKETS, CHUNKS = "seam", "plain sockets", "1 MiB chunks"  # SEAM is Comm.exchange itself
GROUPS, BUILT_IN = "a group a direction", "all_to_all_single"
WAYS = [SOCKETS, SEAM, CHUNKS, GROUPS, BUILT_IN]
Sizes = list[tuple[int, int]]  # (to peer, bytes)


def patterns(rank: int, size: int) -> dict[str, list[Sizes]]:
    """Return a rank's exchanges, which are all posted before any is waited for."""

    def to(*hops: int) -> Sizes:
        return [((rank + hop) % RANKS, size) for hop in hops]

    others = range(1, RANKS)
    found = {f"shift by {hop}": [to(hop)] for hop in others}
    found |= {f"to {hop} on and {hop - 1} back": [to(hop, 1 - hop)] for hop in (2, 3)}
    found |= {
        f"to {hop} on and {hop - 1} back, 2 exchanges": [to(hop), to(1 - hop)] for hop in (2, 3)
    }
    found |= {"both neighbours": [to(1, -1)], "both neighbours, 2 exchanges": [to(1), to(-1)]}
    found |= {
        "one to all": [to(*others) if rank == 0 else []],
        "all to one": [[(0, size)] if rank else []],
    }
    uneven = [((rank + hop) % RANKS, size * 2**hop // 8) for hop in others]
    return found | {"all to all": [to(*others)], "all to all, 1:2:4": [uneven]}


def arriving(pattern: str, rank: int, size: int) -> list[Sizes]:
    """Return the messages that a rank receives: (from peer, bytes)."""
    sent = [patterns(peer, size)[pattern] for peer in range(RANKS)]
    return [
        [(peer, count) for peer in range(RANKS) for to, count in sent[peer][i] if to == rank]
        for i in range(len(sent[0]))
    ]


def ideal(topology: str, pattern: str, size: int, rate_mbit: int) -> float:
    """Return the seconds of the busiest link."""
    load: Counter[Any] = Counter()
    for rank in range(RANKS):
        for peer, count in itertools.chain(*patterns(rank, size)[pattern]):
            for link in [(rank, peer)] if topology == "mesh" else [("from", rank), ("to", peer)]:
                load[link] += count
    return max(load.values()) * 8 / (rate_mbit * 1e6)


class Chunked(Comm):
    """A Comm that cuts messages, and posts chunks to the peers in turn."""

    def start(self, sends: list[Message], recvs: list[Message], exchange: Exchange) -> Pending:
        return super().start(self._cut(sends), self._cut(recvs), exchange)

    def _cut(self, messages: list[Message]) -> list[Message]:
        cut = [[(peer, chunk) for chunk in tensor.split(CHUNK)] for peer, tensor in messages]
        return [
            chunk for turn in itertools.zip_longest(*cut) for chunk in turn if chunk is not None
        ]


@functools.cache
def group(name: str) -> Any:
    return dist.new_group(list(range(RANKS)))


@functools.cache
def connections() -> dict[int, socket.socket]:
    rank, found = dist.get_rank(), {}
    listener = socket.create_server((address(rank), PORT))
    dist.barrier()
    for peer in range(rank):
        found[peer] = socket.create_connection((address(peer), PORT))
        found[peer].sendall(bytes([rank]))
    for _ in range(rank + 1, RANKS):
        connection = listener.accept()[0]
        found[connection.recv(1)[0]] = connection
    return found


def through_sockets(
    sends: list[list[Message]], recvs: list[list[Message]]
) -> list[threading.Thread]:
    """Return one thread per peer and direction, not yet started."""

    def send(peer: int, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            connections()[peer].sendall(memoryview(tensor.numpy()))

    def receive(peer: int, tensors: list[Tensor]) -> None:
        for view in (memoryview(tensor.numpy()) for tensor in tensors):
            done = 0
            while done < len(view):
                done += connections()[peer].recv_into(view[done:])

    threads = []
    for work, exchanges in ((receive, recvs), (send, sends)):
        messages = defaultdict(list)
        for peer, tensor in itertools.chain(*exchanges):
            messages[peer].append(tensor)
        threads += [threading.Thread(target=work, args=item) for item in messages.items()]
    return threads


def content(sender: int, receiver: int, exchange: int, count: int) -> Tensor:
    """Return the content of a small message. Large messages are zeros, and are only timed."""
    if count > 2 * MIB:
        return torch.zeros(count, dtype=torch.uint8)
    return (
        torch.arange(count, dtype=torch.int32)
        .mul_(2 * exchange + 3)
        .add_(sender * RANKS + receiver)
        .to(torch.uint8)
    )


@functools.lru_cache(1)
def buffers(pattern: str, size: int) -> tuple[list[list[Message]], list[list[Message]]]:
    rank = dist.get_rank()
    sends = [
        [(to, content(rank, to, i, n)) for to, n in part]
        for i, part in enumerate(patterns(rank, size)[pattern])
    ]
    return sends, [
        [(peer, torch.zeros(n, dtype=torch.uint8)) for peer, n in part]
        for part in arriving(pattern, rank, size)
    ]


def take(way: str, pattern: str, size: int, check: bool) -> float:
    """Return this rank's seconds for a pattern in one way."""
    rank = dist.get_rank()
    sends, recvs = buffers(pattern, size)
    comms = [
        Chunked(way, rank, RANKS, dist.group.WORLD) if way == CHUNKS else Comm.of(dist.group.WORLD)
    ]
    threads = through_sockets(sends, recvs) if way == SOCKETS and connections() else []
    if way == GROUPS:
        comms = [Comm.of(group("up")), Comm.of(group("down"))]
    whole = torch.zeros(2, RANKS * size if way == BUILT_IN else 0, dtype=torch.uint8)
    dist.barrier()
    start = time.perf_counter()
    if way == BUILT_IN:
        own, peers = [0 if peer == rank else size for peer in range(RANKS)], (RANKS - 1) * size
        dist.all_to_all_single(whole[0, :peers], whole[1, :peers], own, own)
    elif way == SOCKETS:
        for call in (threading.Thread.start, threading.Thread.join):
            for thread in threads:
                call(thread)
    else:
        pending = [
            comm.exchange(
                [m for m in sent if chosen(m[0] < rank)],
                [m for m in received if chosen(m[0] > rank)],
                label=pattern,
            )
            for sent, received in zip(sends, recvs, strict=True)
            for comm, chosen in zip(
                comms, (lambda down: not down or way != GROUPS, lambda down: down), strict=False
            )
        ]
        for exchange in pending:
            exchange.wait()
    seconds = time.perf_counter() - start
    if check and way != BUILT_IN:
        for i, (peer, tensor) in ((i, m) for i, part in enumerate(recvs) for m in part):
            assert torch.equal(tensor, content(peer, rank, i, len(tensor))), (way, pattern, peer)
            tensor.zero_()
    return seconds


def measure(options: Namespace) -> dict[str, Any]:
    samples: dict[str, list[float]] = {}
    for topology in ("mesh", "switch"):
        with Network(topology, RANKS, options.rate) as network:
            cases = [
                (mib, pattern, way)
                for mib in (8, 32)
                for pattern in patterns(0, 1)
                for way in (WAYS if mib == 8 else WAYS[:2])
                if way != BUILT_IN or pattern == "all to all"
            ]
            for _, pattern, way in cases:
                network(take, way, pattern, MIB + 8, True)
            with harness.progress(options.rounds * len(cases)) as begin:
                for mib, pattern, way in cases * options.rounds:
                    begin(f"{topology}, {mib} MiB, {pattern}, {way}")
                    seconds = max(network(take, way, pattern, mib * MIB, False))
                    fraction = ideal(topology, pattern, mib * MIB, options.rate) / seconds
                    samples.setdefault(f"{topology}/{mib} MiB/{pattern}/{way}", []).append(fraction)
    medians = {key: statistics.median(values) for key, values in samples.items()}
    show(medians)
    setting = {"ranks": RANKS, "rate_mbit": options.rate}
    return {"setting": setting, "fraction_of_rate": medians, "samples": samples}


def show(medians: dict[str, float]) -> None:
    """Print one table per topology and size."""
    for place in dict.fromkeys(key.rsplit("/", 2)[0] for key in medians):
        print(f"\n{place:44s}", *(f"{way:>20s}" for way in WAYS))
        for pattern in patterns(0, 1):
            found = [medians.get(f"{place}/{pattern}/{way}", math.nan) for way in WAYS]
            print(
                f"{pattern:44s}",
                *("" if math.isnan(x) else f"{x:11.3f} ({x / found[0]:5.1%})" for x in found),
            )
    print("\nFractions of the nominal rate, and of the rate of plain sockets.")


ARGUMENTS = {"--rate": (400, "rate of a link, Mbit/s"), "--rounds": 3}

if __name__ == "__main__":  # plain sockets are this measurement's canary
    harness.run("network-exchange", __doc__, ARGUMENTS, measure, canary_is="recorded")

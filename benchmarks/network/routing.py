"""Measure the gain of messages that go over two NICs simultaneously.

Two hosts have two NICs each, with one rank per NIC (`nics.py`). Messages go directly, over the NIC
of one rank, or are divided by `seqpar.Routing`, in halves over both NICs of each host. Bits are
compared before anything is timed, and counters of the interfaces show the load of each NIC. The
measured gain is compared with the formula's: a message of n bytes takes n·b_between directly, and
divided

    n·b_inside·(x − 1)/x + n·b_between/x + n·b_inside·(x − 1)/x

seconds over x NICs. b_between comes from the links' nominal rate, b_inside from messages between
two ranks of a host, measured in the same rounds. Divided messages are also measured in one chunk,
as in the formula. The ranks of a host are joined by shared memory in one run, and by links of four
times a NIC's rate in another, where chunks matter.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import seqpar
from benchmarks import harness
from benchmarks.network.nics import Hosts, sent_bytes
from seqpar.comm.messages.comm import Comm
from seqpar.comm.routing.relays import Relays

HOSTS, NICS, MIB = 2, 2, 1 << 20
ROUTING = seqpar.Routing(node_size=NICS, least_bytes=1, chunk_bytes=MIB)
WHOLE = replace(ROUTING, chunk_bytes=1 << 40)
WAYS = {"straight": None, "routed": ROUTING, "in one chunk": WHOLE}
EVEN = "one from each rank"
# (from rank, to rank): ranks 0 and 1 are on the first host, 2 and 3 on the second.
PATTERNS = {
    "one message": [(0, 2)],
    "one across": [(0, 3)],
    "one each way": [(1, 2), (3, 0)],
    EVEN: [(0, 2), (1, 3), (2, 0), (3, 1)],
}
INSIDE = "inside a host"  # measures b_inside
Row = dict[str, Any]


def content(sender: int, count: int) -> Tensor:
    return (torch.arange(count, dtype=torch.int32) * (2 * sender + 3)).to(torch.uint8)


def move(pattern: str, size: int, way: str, check: bool) -> tuple[float, int]:
    """Send the messages of a pattern, and wait for this rank's messages.

    Returns the seconds, and the bytes that this rank's NIC sent.
    """
    comm = Comm.of(dist.group.WORLD)
    pairs = [(0, 1)] if pattern == INSIDE else PATTERNS[pattern]
    called, routing = comm.call(), WAYS[way]
    if routing is not None:
        relays = Relays.of(comm, routing)
        assert relays is not None
        called = relays.in_pass(called, torch.device("cpu"), f"{pattern} of {size}")
    make = content if check else lambda _, count: torch.ones(count, dtype=torch.uint8)
    sends = [(b, make(a, size)) for a, b in pairs if a == comm.rank]
    recvs = [(a, torch.zeros(size, dtype=torch.uint8)) for a, b in pairs if b == comm.rank]
    dist.barrier()
    before, start = sent_bytes(), time.perf_counter()
    called.exchange(sends, recvs, label="routing benchmark").wait()
    seconds = time.perf_counter() - start
    dist.barrier()
    if check:
        for peer, x in recvs:
            assert torch.equal(x, content(peer, size)), (pattern, way, peer)
    return seconds, sent_bytes() - before


def measured(network: Hosts, sizes: list[float], rounds: int) -> list[Row]:
    """Return a row for each pattern and size, with medians over interleaved rounds."""
    cases = [(pattern, int(size * MIB)) for pattern in (*PATTERNS, INSIDE) for size in sizes]
    runs = [(*case, way) for case in cases for way in (WAYS if case[0] != INSIDE else ["straight"])]
    for run in runs:
        network(move, *run, True)
    samples = defaultdict(list)
    with harness.progress(rounds * len(runs)) as begin:
        for pattern, size, way in runs * rounds:
            begin(f"{pattern}, {size}, {way}")
            seconds, sent = zip(*network(move, pattern, size, way, False), strict=True)
            samples[pattern, size, way].append((max(seconds), sent))
    place: Row = {"inside_mbit": network.inside_mbit}
    return [place | row(pattern, size, samples, network.rate_mbit) for pattern, size in cases]


def row(pattern: str, size: int, samples: dict[Any, Any], rate_mbit: int) -> Row:
    """Return the figures of a pattern of messages of this size."""
    found: Row = {"pattern": pattern, "size": size}
    for way in WAYS:
        if taken := samples.get((pattern, size, way)):
            seconds = [x for x, _ in taken]
            found[way] = {"seconds": statistics.median(seconds), "samples": seconds}
            found[way]["nic_bytes"] = taken[-1][1]  # one per rank
    if "routed" in found:
        found["gain"] = found["straight"]["seconds"] / found["routed"]["seconds"]
    if (inside := samples.get((INSIDE, size, "straight"))) and pattern in PATTERNS:
        between = size * 8e-6 / rate_mbit
        within = statistics.median(seconds for seconds, _ in inside)
        routed = 2 * within * (NICS - 1) / NICS + between / NICS
        if pattern == EVEN:
            routed = between  # no message is relayed
        found["formula"] = {"inside": within, "seconds": routed, "gain": between / routed}
    return found


def show(rows: list[Row]) -> None:
    """Print one line per row, with the bytes of each NIC of the first host."""
    for found in rows:
        rate = found["inside_mbit"]
        place = f"{rate} Mbit/s inside" if rate else "memory inside"
        print(f"\n{place}, {found['pattern']}, {found['size'] / MIB:.0f} MiB:", end=" ")
        for way in WAYS:
            if way in found:
                sent = " + ".join(f"{x / MIB:.2f}" for x in found[way]["nic_bytes"][:NICS])
                print(f"{way} {found[way]['seconds'] * 1e3:.0f} ms ({sent} MiB)", end="  ")
        if "gain" in found:
            print(f"gain {found['gain']:.2f}, formula {found['formula']['gain']:.2f}", end="")
    print()


def measure(options: Namespace) -> dict[str, Any]:
    rows = []
    for inside in (0, 4 * options.rate):
        with Hosts(HOSTS, NICS, options.rate, inside) as network:
            rows += measured(network, options.mib, options.rounds)
    show(rows)
    setting = {"hosts": HOSTS, "nics": NICS, "rate_mbit": options.rate}
    return {"setting": setting | {"rounds": options.rounds}, "rows": rows}


ARGUMENTS = {
    "--rate": (200, "rate of a link, Mbit/s"),
    "--mib": ([1.0, 4.0, 16.0], "MiB of a message"),
    "--rounds": 7,
}

if __name__ == "__main__":
    harness.run("network-routing", __doc__, ARGUMENTS, measure, canary_is="recorded")

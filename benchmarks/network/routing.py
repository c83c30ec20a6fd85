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

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import seqpar
from benchmarks import RESULTS, harness
from benchmarks.network.nics import Hosts, sent_bytes
from seqpar.comm.messages.exchange import Comm
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
RING = "RingAttention, forward + backward"
HEADS, DIM = 8, 64
Row = dict[str, Any]


def content(sender: int, count: int) -> Tensor:
    """Return the content of a message."""
    return (torch.arange(count, dtype=torch.int32) * (2 * sender + 3)).to(torch.uint8)


def move(pattern: str, size: int, way: str, check: bool) -> None:
    """Send the messages of a pattern, and wait for this rank's messages."""
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
    timed(lambda: called.exchange(sends, recvs, label="routing benchmark").wait())
    if check:
        for peer, x in recvs:
            assert torch.equal(x, content(peer, size)), (pattern, way, peer)


def ring(tokens: int, way: str, check: bool) -> None:
    """Run a step of attention over all ranks. With `check`, compare its bits without routing."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layout, found = seqpar.Layout.contiguous(tokens * ranks, ranks), []
    for routing in (None, ROUTING) if check else (WAYS[way],):
        generator = torch.Generator().manual_seed(rank)
        leaves = [torch.randn(tokens, HEADS, DIM, generator=generator) for _ in range(3)]
        q, k, v = (x.requires_grad_() for x in leaves)
        attn = seqpar.RingAttention(dist.group.WORLD, routing=routing)

        def step(attn: Any = attn, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            out: Tensor = attn(q, k, v, layout, causal=False)
            out.square().sum().backward()
            return out.detach()

        if check:
            found.append([step(), q.grad, k.grad, v.grad])
        else:
            timed(step)
    if check:
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True)), "Ring's bits differ"


_last: dict[str, Any] = {}


def timed(function: Callable[[], object]) -> None:
    """Run a function on all ranks, and keep its seconds and the bytes that its NIC sent."""
    dist.barrier()
    before, start = sent_bytes(), time.perf_counter()
    function()
    _last["seconds"] = time.perf_counter() - start
    dist.barrier()
    _last["sent"] = sent_bytes() - before


def sample(function: Callable[..., None], *arguments: Any) -> tuple[float, int]:
    """Run a function once. Returns its seconds, and the bytes that this rank's NIC sent."""
    function(*arguments)
    return _last["seconds"], _last["sent"]


def measure(network: Hosts, sizes: list[float], tokens: list[int], rounds: int) -> list[Row]:
    """Return a row for each pattern and size, with medians over interleaved rounds."""
    cases = [(pattern, int(size * MIB)) for pattern in PATTERNS for size in sizes]
    cases += [(RING, count) for count in tokens] + [(INSIDE, int(size * MIB)) for size in sizes]
    runs = [(*case, way) for case in cases for way in (WAYS if case[0] != INSIDE else ["straight"])]
    for pattern, size, way in runs:
        network(sample, *arguments(pattern, size, way, True))
    samples = defaultdict(list)
    with harness.progress(rounds * len(runs)) as begin:
        for pattern, size, way in runs * rounds:
            begin(f"{pattern}, {size}, {way}")
            found = network(sample, *arguments(pattern, size, way, False))
            seconds, sent = zip(*found, strict=True)
            samples[pattern, size, way].append((max(seconds), sent))
    place: Row = {"inside_mbit": network.inside_mbit}
    return [place | row(pattern, size, samples, network.rate_mbit) for pattern, size in cases]


def arguments(pattern: str, size: int, way: str, check: bool) -> tuple[Any, ...]:
    """Return the function for each rank, and its arguments."""
    return (ring, size, way, check) if pattern == RING else (move, pattern, size, way, check)


def row(pattern: str, size: int, samples: dict[Any, Any], rate_mbit: int) -> Row:
    """Return the figures of a pattern at a size: bytes per message, or Ring's tokens per rank."""
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


def first_host(found: Row) -> list[int]:
    """Return the bytes that each NIC of the first host sent."""
    return list(found["nic_bytes"][:NICS])


def name_of(found: Row) -> str:
    """Return the name of a row's link between ranks of a host."""
    rate = found["inside_mbit"]
    return f"{rate} Mbit/s inside" if rate else "memory inside"


def show(rows: list[Row]) -> None:
    """Print one line per row, with the bytes of each NIC of the first host."""
    for found in rows:
        size = found["size"]
        unit = f"{size} tokens" if found["pattern"] == RING else f"{size / MIB:.0f} MiB"
        print(f"\n{name_of(found)}, {found['pattern']}, {unit}:", end=" ")
        for way in WAYS:
            if way in found:
                sent = " + ".join(f"{count / MIB:.2f}" for count in first_host(found[way]))
                print(f"{way} {found[way]['seconds'] * 1e3:.0f} ms ({sent} MiB)", end="  ")
        if "gain" in found:
            print(f"gain {found['gain']:.2f}", end="")
        if "formula" in found:
            print(f", formula {found['formula']['gain']:.2f}", end="")
    print()


def main() -> int:
    """Measure each pattern in each way, print figures, and write the result files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=int, default=200, help="rate of a link, Mbit/s")
    parser.add_argument("--mib", type=float, nargs="*", default=[1, 4, 16], help="MiB of a message")
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[1024], help="Ring's tokens per rank"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-write", action="store_true", help="only print: write no result files")
    options = parser.parse_args()
    before = harness.canary()
    rows = []
    for inside in (0, 4 * options.rate):
        with Hosts(HOSTS, NICS, options.rate, inside) as network:
            rows += measure(network, options.mib, options.tokens, options.rounds)
    drift = harness.drift(before, harness.canary())
    show(rows)
    print(f"the canary drifted by {drift:.1%}")
    if not options.no_write:
        setting = {"hosts": HOSTS, "nics": NICS, "rate_mbit": options.rate}
        setting |= {"rounds": options.rounds, "canary_drift": drift}
        found = {"setting": setting, "rows": rows}
        path = harness.write(RESULTS, "network-routing", found)
        plot(rows, path.with_suffix(".png"))
    return 0


def plot(rows: list[Row], path: Path) -> None:
    """Draw measured gains, the formula's, and the bytes of each NIC of the first host."""
    places = list(dict.fromkeys(name_of(x) for x in rows))
    panels = {"figsize": (16, 5), "layout": "constrained"}
    figure, axes = harness.pyplot().subplots(1, len(places) + 1, **panels)
    for axis, place in zip(axes, places, strict=False):
        for i, pattern in enumerate(PATTERNS):
            chosen = [x for x in rows if name_of(x) == place and x["pattern"] == pattern]
            sizes, color = [x["size"] / MIB for x in chosen], f"C{i}"
            whole = [x["straight"]["seconds"] / x["in one chunk"]["seconds"] for x in chosen]
            axis.plot(sizes, [x["gain"] for x in chosen], "o-", color=color, label=pattern)
            axis.plot(sizes, whole, "x", color=color)
            axis.plot(sizes, [x["formula"]["gain"] for x in chosen], ":", color=color)
        axis.axhline(NICS, color="grey", linewidth=0.5)
        axis.set(xscale="log", xlabel="MiB per message", ylabel="gain", ylim=(0.5, 1.1 * NICS))
        axis.set_title(place)
        axis.legend(fontsize=8, title="x: in one chunk; dotted: the formula")
    largest = max(x["size"] for x in rows if x["pattern"] in PATTERNS)
    chosen = [x for x in rows if name_of(x) == places[0] and "routed" in x]
    chosen = [x for x in chosen if x["pattern"] == RING or x["size"] == largest]
    for i, found in enumerate(chosen):
        for j, way in enumerate(("straight", "routed")):
            below = 0.0
            for nic, count in enumerate(first_host(found[way])):
                label = f"NIC {nic}, {way}" if not i else None
                style = {"color": f"C{nic}", "alpha": 1 - 0.5 * j, "label": label}
                axes[-1].bar(i + 0.4 * j, count / MIB, 0.36, bottom=below, **style)
                below += count / MIB
    names = [x["pattern"].replace(", ", ",\n").replace(" from", "\nfrom") for x in chosen]
    axes[-1].set_xticks([i + 0.2 for i in range(len(chosen))], names, fontsize=7)
    axes[-1].set(ylabel="MiB sent by the first host", title="load of each NIC")
    axes[-1].legend(fontsize=8)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())

"""Measure the cost of recurrent attention on links of a known rate.

    python -m benchmarks.recurrent.links

Two hosts, which are network namespaces (`benchmarks/network/emulated.py`), have one rank and one
core each. Runs of the whole step, without messages, and without compute alternate
(`seqpar.exposure`). The figure is the whole step's time over the time without messages, a median
over rounds. Results are first compared with one process in fp64. Needs root, ip and tc.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

import torch.distributed as dist

from benchmarks import RESULTS, harness
from benchmarks.network.emulated import Network
from benchmarks.recurrent.kernels import LIMIT
from benchmarks.recurrent.ranks import LAYOUTS, PASSES, RANKS, Call
from seqpar.comm.messages.exchange import Comm

KIND, CHECKED = "gated_delta", (96, 2, 8)  # and the shape of the check
Shape = tuple[int, int, int]  # tokens of all ranks, heads, and their size
Row = dict[str, Any]


def error(transport: str) -> float:
    """Return the largest RMS error of this rank's results, over the RMS of the expected results."""
    exact = Call(-1, KIND, transport, CHECKED).prepare(True, exact=True)()
    mine = Call(dist.get_rank(), KIND, transport, CHECKED)
    return harness.worst_error(mine.prepare(True)(), [x[:, mine.index] for x in exact])


def timed(transport: str, shape: Shape, backward: bool, rounds: int) -> Row:
    """Return the exposure of a step, and the bytes that this rank sends in it."""
    step, comm = Call(dist.get_rank(), KIND, transport, shape), Comm.of(dist.group.WORLD)
    return harness.exposed(step.prepare(backward), comm, lambda: comm.sent_bytes, rounds)


def measure(network: Network, shapes: list[Shape], rounds: int) -> list[Row]:
    """Return a row for each transport, shape and pass, after a comparison with one process."""
    for transport in LAYOUTS:
        if not max(errors := network(error, transport)) <= LIMIT:
            raise SystemExit(f"{transport} has wrong results: {errors}; no times were measured")
    rows = []
    for shape, (backward, passes), transport in itertools.product(shapes, PASSES.items(), LAYOUTS):
        found = network(timed, transport, shape, backward, rounds)
        row = {"transport": transport, "layout": LAYOUTS[transport].__name__, "shape": shape}
        row |= {"pass": passes, "rate_mbit": network.rate_mbit, **found[0]}
        row["bytes"] = max(x["bytes"] for x in found)
        row["ratio"] = row["total"] / row["without_communication"]
        rows.append(row)
        print(
            f"{shape[0] // RANKS:6} tokens per rank, {passes:16} {transport:10} "
            f"{row['total'] * 1e3:7.0f} ms, {row['ratio']:.2f} × without communication, "
            f"{row['communication'] * 1e3:.0f} ms of communication, "
            f"{row['bytes'] / 2**20:.1f} MiB",
            flush=True,
        )
    return rows


def main() -> int:
    """Check and time all transports, print ratios, and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 2048, 4096], help="a rank")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rate", type=int, default=200, help="rate of the link, Mbit/s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-write", action="store_true", help="only print: write no result file")
    options = parser.parse_args()
    shapes = [(RANKS * tokens, options.heads, options.dim) for tokens in options.tokens]
    before = harness.canary()
    with Network("mesh", RANKS, options.rate) as network:
        rows = measure(network, shapes, options.rounds)
    found = {"kind": KIND, "canary_drift": harness.check_canary(before, harness.canary())}
    if not options.no_write:
        harness.write(RESULTS, "recurrent-links", found | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())

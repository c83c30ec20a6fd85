"""Measure the cost of recurrent attention on links of a known rate.

    python -m benchmarks.recurrent.links

Two hosts, which are network namespaces (`benchmarks/network/emulated.py`), have one rank and one
core each. Runs of the whole step, without messages, and without compute alternate
(`seqpar.exposure`). The figure is the whole step's time over the time without messages, a median
over rounds. Results are first compared with one process in fp64. Needs root, ip and tc.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from typing import Any

import torch.distributed as dist

from benchmarks import harness
from benchmarks.network.emulated import Network
from benchmarks.recurrent.ranks import LAYOUTS, PASSES, RANKS, Call, Row, Shape, checked
from seqpar.comm.messages.comm import Comm

KIND, CHECKED = "gated_delta", (96, 2, 8)  # and the shape of the check


def exposed(transport: str, shape: Shape, backward: bool, rounds: int) -> Row:
    """Return the exposure of a step, and the bytes that this rank sends in it."""
    step, comm = Call(KIND, transport, shape), Comm.of(dist.group.WORLD)
    return harness.exposed(step.prepare(backward), comm, lambda: comm.sent_bytes, rounds)


def measured(one: Network, link: Network, shapes: list[Shape], rounds: int) -> list[Row]:
    """Return a row for each transport, shape and pass, after a comparison with one process."""
    for transport in LAYOUTS:
        checked(one, link, KIND, transport, CHECKED)
    rows = []
    for shape, (backward, passes), transport in itertools.product(shapes, PASSES.items(), LAYOUTS):
        found = link(exposed, transport, shape, backward, rounds)
        row = {"transport": transport, "layout": LAYOUTS[transport].__name__, "shape": shape}
        row |= {"pass": passes, "rate_mbit": link.rate_mbit, **found[0]}
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


def measure(options: Namespace) -> dict[str, Any]:
    shapes = [(RANKS * tokens, options.heads, options.dim) for tokens in options.tokens]
    with Network("loopback", 1) as one, Network("mesh", RANKS, options.rate) as link:
        return {"kind": KIND, "rows": measured(one, link, shapes, options.rounds)}


ARGUMENTS = {
    "--tokens": ([512, 2048, 4096], "a rank"),
    "--heads": 16,
    "--dim": 128,
    "--rate": (200, "rate of the link, Mbit/s"),
    "--rounds": 5,
}

if __name__ == "__main__":
    harness.run("recurrent-links", __doc__, ARGUMENTS, measure)

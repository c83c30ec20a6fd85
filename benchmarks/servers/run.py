"""Measure attention servers: bandwidth, latency, load, memory, faults and decoding.

On this machine, with servers and clients in separate processes, connected through Unix sockets:

- payloads of 64 KiB to 64 MiB by our transports, compared with plain NIXL and plain gRPC;
- the time that a server adds to a task of 128 tokens, stage by stage;
- tasks per second of 1, 4 and 32 clients of one server, and its busy time;
- its memory after 100 and after 10,000 requests;
- lost tasks and time of recovery if a server is killed or stopped;
- a step of decoding with keys and values on a server, compared with sending them;
- the 99th percentile of steps on four servers, one of them ten times as slow.

Answers are first checked bit for bit. Rounds interleave the contenders of a comparison.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.servers import bandwidth, decoding, faults, latency, load
from seqpar.servers.transport.one_sided import available

Row = dict[str, Any]
QUESTIONS = ["bandwidth", "latency", "load", "memory", "failover", "hedging", "decoding"]
MICROSECOND, MEBIBYTE = 1e-6, 2**20


def measured(options: Namespace, begin: Callable[[str], None]) -> Row:
    transports = ["grpc", *(["nixl"] if available() else [])]
    rounds, results = options.rounds, dict[str, Any]()
    for question in options.only:
        if question == "bandwidth":
            results[question] = bandwidth.measure(rounds, begin)
        elif question == "latency":
            results[question] = [latency.measure(x, rounds, begin) for x in transports]
        elif question == "load":
            found = [load.throughput(x, rounds, options.seconds, begin) for x in transports]
            results[question] = [row for rows in found for row in rows]
        elif question == "memory":
            results[question] = [load.memory(x, options.requests, begin) for x in transports]
        elif question == "failover":
            results[question] = faults.failover("grpc", rounds, begin)
        elif question == "hedging":
            results[question] = faults.hedging("grpc", options.steps, begin)
        elif question == "decoding":
            results[question] = [y for x in transports for y in decoding.measure(x, rounds, begin)]
    return results


def _points(options: Namespace) -> int:
    """Return the number of progress reports."""
    rounds, ends = options.rounds, 2 if available() else 1
    points = {
        "bandwidth": len(bandwidth.SIZES),
        "latency": ends * (rounds + 1),
        "load": ends * rounds * len(load.CLIENTS),
        "memory": ends * 2,
        "failover": rounds * len(faults.FAULTS),
        "hedging": len(faults.SLOW),
        "decoding": ends * len(decoding.LENGTHS),
    }
    return sum(points[question] for question in options.only)


def targets(results: Row) -> list[Row]:
    rows = []

    def add(what: str, found: float, bound: str, limit: float) -> None:
        met = found >= limit if bound == "at least" else found <= limit
        rows.append({"what": what, "found": found, "bound": bound, "limit": limit, "met": met})

    largest = results.get("bandwidth", [])[-1:]
    for row in largest:
        for name, least in (("nixl", 0.95), ("grpc", 0.90)):
            if name in row["of_peer"]:
                what = f"{name}: bandwidth over {bandwidth.PEERS[name]}'s, 64 MiB"
                add(what, row["of_peer"][name], "at least", least)
    for row in results.get("latency", []):
        what = f"{row['transport']}: added to a task of {row['tokens']} tokens, µs"
        add(what, row["added"] / MICROSECOND, "at most", 150.0)
    for row in results.get("load", []):
        name = f"{row['transport']}, {row['clients']} clients"
        if row["clients"] > 1:
            add(f"{name}: tasks a second over one client's", row["of_one"], "at least", 0.9)
            add(
                f"{name}: the least of a client over the mean",
                row["least_of_mean"],
                "at least",
                0.5,
            )
            add(f"{name}: time in which the server computes", row["busy"], "at least", 0.9)
    for row in results.get("memory", []):
        what = f"{row['transport']}: memory grown after {row['requests']} requests"
        add(what, row["grown"], "at most", 0.02)
    for row in results.get("failover", []):
        name = f"a server is {row['fault']}"
        add(f"{name}: tasks tried again", max(row["lost"]), "at most", row["in_flight"])
        add(f"{name}: seconds to recover", max(row["recovery"]), "at most", row["deadline"] + 1)
    for row in results.get("hedging", []):
        if row["steps"] == "hedged" and row["slow"] != "none":
            what = f"one server of four is slow, {row['slow']}: p99 of steps over their median"
            add(what, row["p99_of_median"], "at most", 1.3)
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        found, limit = (
            f"{x:.0f}" if x >= 100 else f"{x:.3g}" for x in (row["found"], row["limit"])
        )
        met = "yes" if row["met"] else "no"
        lines.append([row["what"], found, f"{row['bound']} {limit}", met])
    return harness.table(["what", "found", "target", "met"], lines)


def report(results: Row) -> str:
    parts = [table(targets(results))]
    if "bandwidth" in results:
        parts.append(bandwidth.table(results["bandwidth"]))
    if "latency" in results:
        parts.append(latency.table(results["latency"]))
    if "load" in results:
        parts.append(load.table(results["load"]))
    if "hedging" in results:
        parts.append(faults.table(results["hedging"]))
    if "decoding" in results:
        parts.append(decoding.table(results["decoding"]))
    return "\n\n".join(parts)


def plot(results: Row, path: Path) -> None:
    """Draw one panel for each question with several figures."""
    figure, axes = harness.pyplot().subplots(2, 2, figsize=(12, 8), layout="constrained")
    bandwidth.plot(axes[0, 0], results["bandwidth"])
    latency.plot(axes[0, 1], results["latency"])
    load.plot(axes[1, 0], results["load"])
    faults.plot(axes[1, 1], results["hedging"])
    figure.savefig(path, dpi=120)


def measure(options: Namespace) -> Row:
    torch.set_num_threads(1)
    options.no_write |= options.only != QUESTIONS
    with harness.progress(_points(options)) as begin:
        results = measured(options, begin)
    print(report(results))
    shape = {"heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "bf16"}
    return {"shape": shape, "targets": targets(results), **results}


ARGUMENTS = {
    "--rounds": 7,
    "--seconds": (2.0, "seconds of each number of clients in a round"),
    "--steps": (200, "steps for percentiles"),
    "--requests": (10_000, "requests until memory is compared"),
    "--only": (QUESTIONS, "questions; a part of them is not written", QUESTIONS),
}

if __name__ == "__main__":
    harness.run("servers", __doc__, ARGUMENTS, measure, plot)

"""Measure the cost of linear attention across ranks on links of a known rate.

LASP-2 against LASP-1, Ring with the right product, and plain data parallel
(`linear_contenders.py`), on 2 and 4 ranks (`emulated.py`), in bf16 with one decay per head. On 2
ranks computes are real, with one thread per rank. More ranks than cores cannot compute
simultaneously. On 4 ranks, and on 2 ranks in a second run, sleeps at the rate of real computes
therefore replace them. Results are first checked without sleeps. A cost model
(`papers/linear_cost.py`) is fitted to the shortest and the longest sequences on 2 ranks with
sleeps, and predicts all other runs. `papers/lasp2.py` applies it to the paper's cluster.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from argparse import Namespace
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import harness
from benchmarks.network.emulated import BURST, Network
from benchmarks.network.linear_contenders import CONTENDERS
from benchmarks.papers import linear_cost
from benchmarks.papers.linear_cost import Machine
from seqpar.comm.messages.comm import Comm

HEADS, DIM = 16, 128  # as in the paper: 1 MiB per state, 8 KiB for a token's keys and values
LOG_DECAY = -torch.logspace(-10, -3, HEADS, base=2, dtype=torch.float64)
PASSES = ("forward", "forward + backward")
PLACES = (("mesh", 2), ("mesh", 4), ("switch", 4))
MEASURED = ("total", "without_communication", "communication", "bytes")  # fields of each row
Row = dict[str, Any]


@functools.lru_cache(2)
def operands(tokens: int, seed: int = 0) -> list[Tensor]:
    """Return q, k, v and dout of a rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, tokens, HEADS, DIM, generator=generator).bfloat16() for _ in range(4)]


def step(contender: str, tokens: int, backward: bool, seed: int = 0) -> list[Tensor]:
    """Return a contender's results on a rank: out, and with `backward` dq, dk and dv."""
    q, k, v, dout = operands(tokens, seed)
    return CONTENDERS[contender](
        Comm.of(dist.group.WORLD), q, k, v, LOG_DECAY, dout if backward else None
    )


def error(contender: str, tokens: int) -> float:
    """Return the largest RMS error of out, dq, dk and dv, over the RMS of the expected results.

    Those are computed in fp64 by the definition.
    """
    rank = dist.get_rank()
    ranks = [rank] if contender == "data parallel" else range(dist.get_world_size())
    q, k, v, dout = (
        torch.cat(x, 1).double()
        for x in zip(*(operands(tokens, peer) for peer in ranks), strict=True)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    i = torch.arange(q.shape[1])
    age = i[:, None] - i
    decay = torch.exp(LOG_DECAY[:, None, None] * age.clamp(min=0)) * (age >= 0)
    out = torch.einsum("bqhd,bkhd,hqk,bkhe->bqhe", q, k, decay, v)
    expected = [out, *torch.autograd.grad(out, leaves, dout)]
    mine = slice(ranks.index(rank) * tokens, (ranks.index(rank) + 1) * tokens)
    return harness.worst_error(
        step(contender, tokens, backward=True, seed=rank), [x[:, mine] for x in expected]
    )


def timed(
    contender: str, tokens: int, backward: bool, seconds_per_area: float | None
) -> dict[str, Any]:
    """Return the exposure of one round, and the bytes that this rank sends in it."""
    comm = Comm.of(dist.group.WORLD)
    return harness.exposed(
        lambda: step(contender, tokens, backward),
        comm,
        lambda: comm.sent_bytes,
        1,
        seconds_per_area,
    )


def measured(
    network: Network, lengths: list[int], rounds: int, seconds_per_area: float | None
) -> list[Row]:
    """Return a row for each contender, length and pass, with medians over interleaved rounds."""
    samples = defaultdict(list)
    cases = list(itertools.product(lengths, PASSES, CONTENDERS))
    with harness.progress(rounds * len(cases)) as begin:
        for case in cases * rounds:
            tokens, passes, contender = case
            begin(f"{network.topology}, {network.ranks} ranks, {tokens} tokens, {contender}")
            found = network(timed, contender, tokens, passes != PASSES[0], seconds_per_area)
            samples[case].append(found[0] | {"bytes": max(x["bytes"] for x in found)})
    place: Row = {"topology": network.topology, "ranks": network.ranks}
    place |= {"rate_mbit": network.rate_mbit}
    place |= {"computes": "real" if seconds_per_area is None else "sleeps"}
    rows = []
    for (tokens, passes, contender), found in samples.items():
        row = place | {"contender": contender, "tokens": tokens, "pass": passes}
        rows.append(row | {key: statistics.median(x[key] for x in found) for key in MEASURED})
    return rows


def parts(row: Row) -> list[linear_cost.Pass]:
    """Return the passes of a row, in the model's terms."""
    return linear_cost.passes(row["tokens"], HEADS, DIM)[: 1 + (row["pass"] != PASSES[0])]


def shape(row: Row) -> Machine:
    """Return the machine of a row, without its constants."""
    return Machine(row["ranks"], 0.0, 0.0, 0.0, ports=int(row["topology"] == "switch"), burst=BURST)


def predict(rows: list[Row]) -> dict[str, float]:
    """Fit the model's constants, and add to each row its prediction and whether it was fitted."""
    lengths = {row["tokens"] for row in rows}
    ends = min(lengths), max(lengths)
    for row in rows:
        row["fitted"] = row["ranks"] == 2 and row["computes"] == "sleeps" and row["tokens"] in ends
    times = ("without_communication", "communication")
    samples = [
        (row["contender"], shape(row), parts(row), *(row[time] for time in times))
        for row in rows
        if row["fitted"]
    ]
    constants = linear_cost.fit(samples)
    for row in rows:
        machine = linear_cost.replace(shape(row), **constants)
        row["predicted"] = linear_cost.seconds(row["contender"], machine, parts(row))
    return constants


def errors(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Return the model's errors on held-out runs, by place."""
    by_place = defaultdict(list)
    for row in rows:
        if not row["fitted"]:
            by_place[f"{row['topology']}, {row['ranks']} ranks, {row['computes']}"].append(
                abs(row["predicted"] / row["total"] - 1)
            )
    return {
        place: {
            "median": statistics.median(found),
            "worst": max(found),
            "within_15_percent": sum(x <= 0.15 for x in found) / len(found),
        }
        for place, found in by_place.items()
    }


def show(rows: list[Row], constants: dict[str, float]) -> None:
    for row in rows:
        slowdown, off = row["total"] / row["without_communication"], row["predicted"] / row["total"]
        print(
            f"{row['topology']:6} {row['ranks']} ranks, {row['computes']:6} {row['tokens']:6} "
            f"tokens, {row['pass']:18} {row['contender']:18} {row['total'] * 1e3:7.0f} ms, "
            f"{slowdown:6.2f} × without communication, {row['bytes'] / 2**20:6.1f} MiB, predicted "
            f"{row['predicted'] * 1e3:7.0f} ({off - 1:+4.0%}{', fitted' * row['fitted']})"
        )
    call, latency = constants["call"] * 1e3, constants["latency"] * 1e3
    rate, area = 8e-6 / constants["byte"], constants["area"] * 1e9
    print(
        f"\nThe model: {call:.2f} ms per pass, {latency:.2f} ms per message, {rate:.0f} Mbit/s, "
        f"{area:.2f} ns per unit of area"
    )
    for place, found in errors(rows).items():
        print(
            f"held out, {place}: off by {found['median']:.1%} (median), {found['worst']:.1%} at "
            f"most; {found['within_15_percent']:.0%} of the runs within 15%"
        )


def measure(options: Namespace) -> dict[str, Any]:
    rows, area_seconds = [], 0.0
    for topology, ranks in PLACES:
        with Network(topology, ranks, options.rate) as network:
            for contender in CONTENDERS:
                harness.check_error(contender, max(network(error, contender, 64)), 0.02)
            if not area_seconds:  # at the first place, which has 2 ranks
                rows += measured(network, options.tokens, options.rounds, None)
                longest = [row for row in rows if row["tokens"] == max(options.tokens)]
                own = [row for row in longest if row["contender"] == "data parallel"][-1]
                area_seconds = own["total"] / sum(part.area for part in parts(own))
            rows += measured(network, options.tokens, options.rounds, area_seconds)
    constants = predict(rows)
    show(rows, constants)
    setting = {"heads": HEADS, "head_dim": DIM, "dtype": "bf16", "rounds": options.rounds}
    model = {"constants": constants, "held_out_errors": errors(rows)}
    return {"setting": setting, "rows": rows, "model": model}


ARGUMENTS = {
    "--tokens": ([512, 2048, 4096], "a rank"),
    "--rate": (200, "rate of a link, Mbit/s"),
    "--rounds": 3,
}

if __name__ == "__main__":
    harness.run("network-linear", __doc__, ARGUMENTS, measure, canary_is="recorded")

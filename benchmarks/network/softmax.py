"""Measure softmax strategies' communication on links of a known rate, and its exposed share.

4 ranks on a mesh of links and on a switch (`emulated.py`) compute attention with multiple heads, in
bf16, without a mask. More ranks than cores cannot compute simultaneously, so sleeps replace
computes, with the same time per query-key pair. Results are first checked without sleeps. `ratio`
is the compute time of a step of Ring over its transfer time. On 2, 4 and 8 ranks of a switch the
program also measures how communication grows.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.network.emulated import Network
from benchmarks.steps import Step, module
from seqpar import Layout
from seqpar.core.hooks import set_hooks

RANKS, HEADS, DIM = 4, 8, 64
UNIT = HEADS * DIM * 2  # bytes of q, k or v per token
LARGEST_ERROR = 0.02  # in bf16
BF16 = {"partial_dtype": torch.bfloat16}
Contender = tuple[str, dict[str, Any]]  # a strategy and its options
CONTENDERS: dict[str, Contender] = {
    "ring": ("ring", {}),
    "token_ring, fp32 partials": ("token_ring", {}),
    "token_ring, bf16 partials": ("token_ring", BF16),
    "all_gather": ("all_gather", {}),
    "ulysses, 1 head group": ("ulysses", {"head_groups": 1}),
    "ulysses, 2 head groups": ("ulysses", {"head_groups": 2}),
    "usp 2 x 2, ring": ("usp", {}),
}
Row = dict[str, Any]
PASSES = {"forward": False, "forward + backward": True}


@functools.cache
def step(local: int, backward: bool) -> Step:
    """Return a step with `local` tokens per rank, on as many ranks as there are."""
    ranks = dist.get_world_size()
    layout = Layout.contiguous(local * ranks, ranks)
    return Step(layout, HEADS, DIM, dtype=torch.bfloat16, backward=backward, causal=False)


def error(contender: Contender, local: int) -> float:
    """Return the error of a contender's results."""
    strategy, options = contender
    return step(local, True).error(module(strategy, **options))


def exposed(
    contender: Contender, local: int, backward: bool, pair_seconds: float, rounds: int
) -> dict[str, Any]:
    """Return the exposure of a step with sleeps as computes, and the bytes that a rank sends."""
    strategy, options = contender
    return step(local, backward).exposed(module(strategy, **options), rounds, pair_seconds)


def communication(contender: Contender, local: int, rounds: int) -> list[float]:
    """Return this rank's seconds of forward and backward without compute, round by round."""
    strategy, options = contender
    with set_hooks(replace_compute=lambda area: None):
        return step(local, True).times(module(strategy, **options), rounds)


def transfer_seconds(network: Network, tokens: int) -> float:
    """Return the seconds in which a step of Ring sends its keys and values."""
    return 2 * UNIT * tokens * 8 / (network.rate_mbit * 1e6)


def measured(network: Network, options: Namespace, ratios: list[float]) -> list[Row]:
    """Return a row for each contender, pass and ratio."""
    for name in options.contenders:
        harness.check_error(name, max(network(error, CONTENDERS[name], 64)), LARGEST_ERROR)
    of_a_pair = transfer_seconds(network, options.tokens) / (options.tokens**2 * HEADS)
    rows: list[Row] = []
    for name, passes, ratio in itertools.product(options.contenders, PASSES, ratios):
        call = options.tokens, PASSES[passes], ratio * of_a_pair, options.rounds
        found = network(exposed, CONTENDERS[name], *call)
        row = {"topology": network.topology, "rate_mbit": network.rate_mbit}
        row |= {"contender": name, "pass": passes, "ratio": ratio}
        rows.append(row | found[0] | {"bytes": max(x["bytes"] for x in found)})
        show(rows[-1])
    return rows


def show(row: Row) -> None:
    times = ("total", "without_communication", "communication")
    whole, without, alone = (f"{row[key] * 1e3:6.0f}" for key in times)
    low, high = row["spread"]
    print(
        f"{row['topology']:7}{row['rate_mbit']:5} Mbit/s {row['contender']:26}{row['pass']:19} "
        f"compute {row['ratio']:3}: {whole} ms, without communication {without}, communication "
        f"{alone}, exposed {row['fraction']:4.0%} ({low:.0%} to {high:.0%}), "
        f"{row['bytes'] / 2**20:5.1f} MiB",
        flush=True,
    )


def grown(options: Namespace) -> list[Row]:
    """Return the time of communication on a switch as ranks and tokens grow together."""
    rows: list[Row] = []
    rate = min(options.rates)
    for ranks in (2, 4, 8):
        with Network("switch", ranks, rate) as network:
            for name in ("ring", "ulysses, 1 head group"):
                found = network(communication, CONTENDERS[name], options.tokens, options.rounds)
                seconds = statistics.median_low(map(max, zip(*found, strict=True)))
                row = {"ranks": ranks, "rate_mbit": rate, "contender": name, "seconds": seconds}
                rows.append(row)
                tokens = options.tokens * ranks
                print(f"{ranks} ranks, {tokens} tokens, {name}: {seconds * 1e3:.0f} ms", flush=True)
    return rows


def measure(options: Namespace) -> dict[str, Any]:
    rows: list[Row] = []
    for topology, rate in itertools.product(options.topologies, options.rates):
        ratios = options.ratios if rate == options.rates[0] else options.ratios[-1:]
        with Network(topology, RANKS, rate) as network:
            rows += measured(network, options, ratios)
    growth = [] if options.no_growth else grown(options)
    shape = {"ranks": RANKS, "tokens_per_rank": options.tokens, "rounds": options.rounds}
    shape |= {"heads": HEADS, "head_dim": DIM, "dtype": "bf16"}
    return {"shape": shape, "rows": rows, "growth": growth}


ARGUMENTS = {
    "--tokens": (1024, "a rank"),
    "--rates": ([100, 200], "rates of a link, Mbit/s"),
    "--ratios": ([0.5, 1.5], "ratios at the first rate; other rates use the last"),
    "--rounds": 5,
    "--topologies": ["mesh", "switch"],
    "--contenders": ([*CONTENDERS], None, [*CONTENDERS]),
    "--no-growth": (False, "do not measure growth on 2, 4 and 8 ranks"),
}

if __name__ == "__main__":
    harness.run("network-softmax", __doc__, ARGUMENTS, measure, canary_is="recorded")

"""Compare a step of decoding on ranks with attention to a rank's keys plus one exchange.

Each of 2 and of 4 ranks, with one thread, has 16,384 keys of a prompt from a sharded prefill.
Rounds interleave four contenders, on all ranks simultaneously, with several layers each: `step`, of
`seqpar.ShardedCache`; `local`, the same query over a rank's own keys by `Attention.decode` on a
group of one rank; `sdpa`, the same by torch's SDPA with `enable_gqa`; and `exchange`, a gather of
messages as large as a step's. A round's figure is the slowest rank's. The step's out is first
compared with an fp64 softmax over all keys.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness
from benchmarks.network.emulated import Network
from seqpar import Layout, ShardedCache, make_attention
from seqpar.comm.messages.comm import Comm

LARGEST_ERROR = 1e-5  # of out in fp32, RMS over RMS
Step = Callable[[], object]


def drawn(tokens: int, heads: int, dim: int, seed: int) -> Tensor:
    """Return (1, tokens, heads, dim), the same on all ranks."""
    return torch.randn(1, tokens, heads, dim, generator=torch.Generator().manual_seed(seed))


def contenders(options: Namespace) -> tuple[dict[str, Step], float]:
    """Return this rank's contenders, with one call per layer, and the error of a step."""
    heads, kv_heads, dim = options.heads, options.kv_heads, options.dim
    attn = make_attention("ring", dist.group.WORLD)
    tokens = options.keys * attn.ranks
    layout = Layout.zigzag(tokens, attn.ranks)
    k, v = (drawn(tokens, kv_heads, dim, seed) for seed in (0, 1))
    local = [layout.shard(x, attn.rank, dim=1) for x in (k, v)]
    q, new_k, new_v = (drawn(1, x, dim, 2 + x) for x in (heads, kv_heads, kv_heads))
    cache = ShardedCache(attn, layout, reserve=options.rounds * options.layers + attn.ranks)
    cache.put(0, *local)

    def step() -> Tensor:
        cache.extend()
        outs = [cache.attend(0, q, new_k, new_v) for _ in range(options.layers)]
        return outs[-1]

    out = step()
    whole = [torch.cat(x, 1).double().transpose(1, 2) for x in ((k, new_k), (v, new_v))]
    right = F.scaled_dot_product_attention(q.double().transpose(1, 2), *whole, enable_gqa=True)
    error = harness.worst_error([out], [right.transpose(1, 2)])
    alone = make_attention("ring", Comm(f"alone {attn.rank}", 0, 1))
    own = Layout.contiguous(local[0].shape[1], 1)
    heads_first = [x.transpose(1, 2) for x in (q, *local)]
    message, comm = torch.empty(heads * (dim + 1)), Comm.of(dist.group.WORLD)
    calls: dict[str, Step] = {
        "local": lambda: alone.decode(q, *local, own),
        "sdpa": lambda: F.scaled_dot_product_attention(*heads_first, enable_gqa=True),
        "exchange": lambda: comm.all_gather(message, label="benchmark"),
    }
    layers = range(options.layers)
    repeated = {name: lambda call=call: [call() for _ in layers] for name, call in calls.items()}
    return {"step": step, **repeated}, error


def timed(options: Namespace) -> tuple[float, dict[str, list[float]]]:
    """Return the error, and each contender's seconds per layer in each round, on this rank."""
    with torch.no_grad():
        steps, error = contenders(options)
        for step in steps.values():
            step()
        found: dict[str, list[float]] = {name: [] for name in steps}
        for _, name in harness.turns(steps, options.rounds):
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            found[name].append((time.perf_counter() - start) / options.layers)
    return error, found


def row_of(options: Namespace, ranks: int) -> dict[str, Any]:
    """Return the error, milliseconds per layer on the slowest rank, and ratios."""
    with Network("loopback", ranks, timeout=600) as network:
        answers = network(timed, options)
    error = max(error for error, _ in answers)
    harness.check_error("a step", error, LARGEST_ERROR)
    samples = {
        name: [max(each) * 1e3 for each in zip(*(found[name] for _, found in answers), strict=True)]
        for name in answers[0][1]
    }
    medians = {name: statistics.median(values) for name, values in samples.items()}
    ratios = {
        f"step of {name} and exchange": medians["step"] / (medians[name] + medians["exchange"])
        for name in ("local", "sdpa")
    }
    for name, milliseconds in medians.items():
        print(f"{ranks} ranks, {name:10s}{milliseconds:9.3f} ms per layer")
    for name, ratio in ratios.items():
        print(f"{ranks} ranks, {name}: {ratio:.2f}")
    return {"error": error, "milliseconds": medians, "ratios": ratios, "samples": samples}


def measure(options: Namespace) -> dict[str, Any]:
    rows = {ranks: row_of(options, ranks) for ranks in options.ranks}
    shape = {name: vars(options)[name] for name in ("keys", "heads", "kv_heads", "dim")}
    return {"shape": shape, "ranks": rows}


ARGUMENTS = {
    "--keys": (16_384, "keys of a rank"),
    "--heads": 8,
    "--kv-heads": 2,
    "--dim": 64,
    "--layers": 8,
    "--rounds": 21,
    "--ranks": [2, 4],
}

if __name__ == "__main__":
    harness.run("decoding", __doc__, ARGUMENTS, measure)

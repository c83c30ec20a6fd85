"""Compare a step of decoding on ranks with attention to a rank's keys plus one exchange.

Each of 2 and of 4 ranks, with one thread, has 16,384 keys of a prompt from a sharded prefill.
Rounds interleave four contenders, on all ranks simultaneously, with several layers each: `step`, of
`seqpar.ShardedCache`; `local`, the same query over a rank's own keys by `Attention.decode` on a
group of one rank; `sdpa`, the same by torch's SDPA with `enable_gqa`; and `exchange`, a gather of
messages as large as a step's. A round's figure is the slowest rank's. The step's out is first
compared with an fp64 softmax over all keys.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks import RESULTS, harness
from seqpar import Layout, ShardedCache, make_attention
from seqpar.comm.messages.exchange import Comm

LARGEST_ERROR = 1e-5  # of out in fp32, RMS over RMS
Step = Callable[[], object]


def drawn(tokens: int, heads: int, dim: int, seed: int) -> Tensor:
    """Return (1, tokens, heads, dim), the same on all ranks."""
    return torch.randn(1, tokens, heads, dim, generator=torch.Generator().manual_seed(seed))


def contenders(options: argparse.Namespace) -> tuple[dict[str, Step], float]:
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


def serve(
    rank: int, ranks: int, options: argparse.Namespace, store_file: str, pipe: Connection
) -> None:
    """Run a rank: send the error, then each contender's seconds per layer in each round."""
    torch.set_num_threads(1)
    store = dist.FileStore(store_file, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    with torch.no_grad():
        steps, error = contenders(options)
        for step in steps.values():
            step()
        found: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(options.rounds):
            for name, step in steps.items():
                dist.barrier()
                start = time.perf_counter()
                step()
                found[name].append((time.perf_counter() - start) / options.layers)
    pipe.send((error, found))
    dist.barrier()
    dist.destroy_process_group()


def measure(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Run all ranks. Returns the error, milliseconds per layer, and ratios."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            arguments = rank, ranks, options, f"{folder}/store", theirs
            processes.append(context.Process(target=serve, args=arguments, daemon=True))
            processes[-1].start()
            pipes.append(ours)
        answers = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    samples = {
        name: [max(of_ranks) * 1e3 for of_ranks in zip(*(x[name] for _, x in answers), strict=True)]
        for name in answers[0][1]
    }
    medians = {name: statistics.median(values) for name, values in samples.items()}
    ratios = {
        f"step of {name} and exchange": medians["step"] / (medians[name] + medians["exchange"])
        for name in ("local", "sdpa")
    }
    error = max(error for error, _ in answers)
    return {"error": error, "milliseconds": medians, "ratios": ratios, "samples": samples}


def main() -> int:
    """Time the contenders, print their figures, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"keys": 16_384, "heads": 8, "kv_heads": 2, "dim": 64}
    for name, default in {**sizes, "layers": 8, "rounds": 21}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--no-write", action="store_true", help="only print: write no result file")
    options = parser.parse_args()
    canary = 0.0 if options.no_write else harness.canary()
    rows = {ranks: measure(options, ranks) for ranks in options.ranks}
    for ranks, found in rows.items():
        if found["error"] > LARGEST_ERROR:
            print(f"wrong: the error of a step is {found['error']:.1e}")
            return 1
        for name, milliseconds in found["milliseconds"].items():
            print(f"{ranks} ranks, {name:10s}{milliseconds:9.3f} ms per layer")
        for name, ratio in found["ratios"].items():
            print(f"{ranks} ranks, {name}: {ratio:.2f}")
    if not options.no_write:
        drift = harness.check_canary(canary, harness.canary())
        shape = {name: vars(options)[name] for name in sizes}
        results = {"shape": shape, "canary_drift": drift, "ranks": rows}
        harness.write(RESULTS, "decoding", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())

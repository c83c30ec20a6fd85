"""Compare an enabled transformers model with calls of seqpar written by hand.

2 ranks × 1 thread, a block of Llama (8 heads, D = 64), 4,096 tokens, causal, Ring, zigzag: sharding
the batch, forward, backward, and the sum of all gradients over the ranks. "By hand" is a function
registered with transformers that calls `RingAttention`, a batch sharded by its layout, and one
all-reduce of all gradients after backward. `enable` is measured with and without its check of the
ranks' calls. Rounds interleave all contenders in the same two processes; the figure is the ratio of
medians on the slowest rank. Outputs and gradients must agree. If the machine was unsteady, a run
writes no results: run it again.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from benchmarks import harness
from benchmarks.network.emulated import Network
from seqpar import Layout, RingAttention
from seqpar.integrations import huggingface

HAND, ENABLED, UNCHECKED = "by hand", "enable", "enable, check_ranks=False"
RANKS = 2


def block(dim: int) -> Any:
    """Return a Llama of one layer, the same on all ranks."""
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=dim,
        intermediate_size=3 * dim,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=2**20,
    )
    torch.manual_seed(0)
    return transformers.LlamaModel(config)


Step = Callable[[Tensor], Tensor]  # whole ids -> a rank's states, after their sum's backward


def by_hand(model: Any, group: dist.ProcessGroup) -> Step:
    """Return a training step written by hand."""
    attention, rank, ranks = RingAttention(group), dist.get_rank(group), dist.get_world_size(group)
    layouts: list[Layout] = []

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> Any:
        return attention(*(x.transpose(1, 2) for x in (q, k, v)), layouts[-1], causal=True), None

    transformers.AttentionInterface.register("by-hand", attend)
    model.set_attn_implementation("by-hand")  # transformers makes no mask for an unknown name

    def call(ids: Tensor) -> Tensor:
        layouts[:] = [Layout.zigzag(ids.shape[1], ranks, equal=True)]
        positions = layouts[0].position_ids(rank)[None]
        local = layouts[0].shard(ids, rank, dim=1)
        out = model(input_ids=local, position_ids=positions, use_cache=False).last_hidden_state
        out.sum().backward()
        gradients = [x.grad for x in model.parameters()]
        flat = torch.cat([x.flatten() for x in gradients])
        dist.all_reduce(flat, group=group)
        for x, total in zip(gradients, flat.split([x.numel() for x in gradients]), strict=True):
            x.copy_(total.view_as(x))
        return out.detach()

    return call


def enabled(model: Any, group: dist.ProcessGroup, check: bool) -> Step:
    """Return a training step with `enable`."""
    sp = huggingface.enable(model, group, "ring", check_ranks=check)

    def call(ids: Tensor) -> Tensor:
        out = model(**sp.shard({"input_ids": ids})).last_hidden_state
        sp.total(out.sum()).backward()
        sp.average_gradients()
        return out.detach()

    return call


def timed(group: dist.ProcessGroup, tokens: int, dim: int, rounds: int) -> dict[str, list[float]]:
    """Return each contender's seconds per round on the slowest rank, after a check of results."""
    models = {name: block(dim) for name in (HAND, ENABLED, UNCHECKED)}
    calls = {
        HAND: by_hand(models[HAND], group),
        ENABLED: enabled(models[ENABLED], group, check=True),
        UNCHECKED: enabled(models[UNCHECKED], group, check=False),
    }
    ids = torch.randint(256, (1, tokens), generator=torch.Generator().manual_seed(1))
    states = {name: call(ids) for name, call in calls.items()}
    for name, out in states.items():
        torch.testing.assert_close(out, states[HAND])
        for x, expected in zip(models[name].parameters(), models[HAND].parameters(), strict=True):
            torch.testing.assert_close(x.grad, expected.grad)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for i, name in harness.turns(calls, rounds + 1):
        models[name].zero_grad()
        dist.barrier(group)
        start = time.perf_counter()
        calls[name](ids)
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group)
        if i:  # the first round warms up
            samples[name].append(float(seconds))
    return samples


def on_all_ranks(tokens: int, rounds: int) -> dict[str, list[float]]:
    return timed(dist.group.WORLD, tokens, 512, rounds)


def measure(options: Namespace) -> dict[str, Any]:
    with Network("loopback", RANKS, timeout=600) as network:
        samples, _ = network(on_all_ranks, options.tokens, options.rounds)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    ratios = {name: seconds / medians[HAND] for name, seconds in medians.items()}
    for name, seconds in medians.items():
        print(f"{name:30s} {seconds * 1e3:9.1f} ms   {ratios[name]:.3f} of by hand")
    shape = {"tokens": options.tokens, "heads": 8, "head_dim": 64, "ranks": RANKS}
    return {"shape": shape, "ratio_to_hand": ratios, "seconds": samples}


if __name__ == "__main__":
    harness.run("huggingface", __doc__, {"--tokens": 4096, "--rounds": 21}, measure)

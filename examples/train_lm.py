"""Train a byte-level language model on real text, with attention divided among processes.

Train on 2 processes:
    torchrun --nproc-per-node 2 examples/train_lm.py --attention ring
Train with all strategies, and compare with one process:
    python examples/train_lm.py --compare
Train on documents of uneven length, balanced over the ranks:
    torchrun --nproc-per-node 2 examples/train_lm.py --balance auto

The text is the source of Python's own standard library, or --text DIR_OR_FILE. Each file is a
document. Documents are packed into batches of --seq-len tokens, and each rank computes some of the
tokens of every batch. With --balance, the text is cut into documents whose lengths are as uneven as
in pretraining, and a planner assigns them to ranks (`balanced.py`).

Two common mistakes:

* Labels must be shifted before the batch is sharded. On a rank, the next row is often not the next
  token of the document.
* The loss must be averaged over the tokens of all ranks. Ranks hold different numbers of labels, so
  a rank divides the *sum* of its losses by the number of labels on *all* ranks, and gradients are
  *summed* over ranks. (DDP and FSDP average gradients instead: with them, multiply the loss by the
  number of ranks.)
"""

import argparse
import itertools
import json
import resource
import sys
import time
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from balanced import Balanced, cost_model
from checkpoints import load, save
from data import Packed, batches, documents
from einops import rearrange
from faults import FAULTS
from model import Attend, Transformer
from options import LAYOUTS, STRATEGIES, VARIANTS, arguments, parse
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import seqpar
from seqpar.costs import step_flops

LEARNING_RATE = 1e-3
Plans = dict[str, tuple[str, int, int]]  # by label: attention, processes, threads
MicroBatch = dict[str, Any]  # this rank's tokens of a batch, in the form of `balance.collate`


def sdpa_by_document(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: list[int]) -> Tensor:
    """Return attention without seqpar, for comparison: torch's SDPA, for one document at a time."""
    outputs = []
    for start, stop in itertools.pairwise(cu_seqlens):
        operands = (rearrange(x[start:stop], "t h d -> 1 h t d") for x in (q, k, v))
        out = F.scaled_dot_product_attention(*operands, is_causal=True, enable_gqa=True)
        outputs.append(rearrange(out, "1 h t d -> t h d"))
    return torch.cat(outputs)


class Trainer:
    """A model, its optimizer and its attention on this rank."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.rank, self.ranks, self.device = dist.get_rank(), dist.get_world_size(), device
        torch.manual_seed(0)  # the same parameters on every rank
        self.model = self.make_model(options).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE)
        self.make_layout = LAYOUTS[options.layout]
        group: seqpar.Group = dist.group.WORLD
        if options.attention in ("mesh", "usp"):  # rows of two ranks, or of one
            group = init_device_mesh(
                device.type, (self.ranks // 2, 2) if self.ranks % 2 == 0 else (self.ranks, 1)
            )
        name, settings = VARIANTS.get(options.attention, (options.attention, {}))
        self.attention = None if name == "sdpa" else seqpar.make_attention(name, group, **settings)

    def make_model(self, options: argparse.Namespace) -> Transformer:
        return Transformer()

    def attend(self, layout: seqpar.Layout) -> Attend:
        """Return the model's attention over one batch."""
        if self.attention is None:
            return partial(sdpa_by_document, cu_seqlens=layout.cu_seqlens.tolist())
        return partial(self.attention, layout=layout, causal=True)

    def shard(self, ids: Tensor, cu_seqlens: Tensor) -> MicroBatch:
        """Return this rank's tokens of a packed batch, in the form of `balance.collate`."""
        layout = self.make_layout(cu_seqlens, self.ranks)
        labels = seqpar.shift_labels(ids, cu_seqlens)  # before sharding
        count = int((labels >= 0).sum())  # of the whole batch, which every rank has read
        return {
            "input_ids": layout.shard(ids, self.rank),
            "labels": layout.shard(labels, self.rank),
            "position_ids": layout.position_ids(self.rank),
            "layout": layout,
            "loss_weight": 1 / count,
        }

    def step(self, micro_batches: list[MicroBatch]) -> float:
        """Make one step. Returns the mean loss over all labels of its micro-batches."""
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for local in micro_batches:
            names = ("input_ids", "position_ids", "labels")
            ids, positions, labels = (local[name].to(self.device) for name in names)
            logits = self.model(ids, positions, self.attend(local["layout"]))
            loss = F.cross_entropy(logits, labels, reduction="sum") * local["loss_weight"]
            loss.backward()
            total += loss.detach()
        self.sum_over_ranks([p.grad for p in self.model.parameters() if p.grad is not None])
        self.optimizer.step()
        dist.all_reduce(total)
        return float(total)

    def sum_over_ranks(self, gradients: list[Tensor]) -> None:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(
            gradients, flat.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))

    def cost_model(self) -> seqpar.balance.Model:
        """Return the planner's description of the model."""
        return cost_model(self.model)

    def step_flops(self, micro_batches: list[MicroBatch]) -> float:
        """Return the FLOPs of a step on all ranks, as MFU counts them."""
        edges = [local["layout"].cu_seqlens for local in micro_batches]
        return sum(step_flops(self.cost_model(), np.diff(x)) for x in edges)

    def sent_bytes(self) -> int:
        """Return the bytes that this rank has sent for attention so far."""
        return 0 if self.attention is None else self.attention.sent_bytes


def matmul_rate(device: torch.device, size: int = 1024, rounds: int = 8) -> float:
    """Return this device's measured FLOP/s of a large matrix product, in the model's dtype."""
    x = torch.randn(size, size, device=device)
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        (x @ x).sum().item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def peak_bytes(device: torch.device) -> int:
    """Return this rank's peak memory so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def longest_context(
    trainer: Trainer, contents: list[bytes], tokens: int, budget: int = 2 * 2**30
) -> int:
    """Return how many tokens fit into `budget` bytes on each rank.

    The peak memory of a step is measured at 4 and 8 times the length, and a line through the two
    peaks is extended to `budget`. Documents are cut at 512 tokens, because their lengths affect
    the time but not the memory.
    """
    peaks = []
    for factor in (4, 8):
        ids = next(batches(contents, factor * tokens))[0]
        cu_seqlens = torch.arange(0, len(ids) + 512, 512).clamp(max=len(ids))
        trainer.step([trainer.shard(ids, cu_seqlens)])
        peaks.append(peak_bytes(trainer.device))
    slope = (peaks[1] - peaks[0]) / (4 * tokens)
    return int(8 * tokens + (budget - peaks[1]) / slope) if slope > 0 else 0


def train(options: argparse.Namespace, make_trainer: type[Trainer]) -> None:
    torch.set_num_threads(options.threads)
    cuda = torch.cuda.is_available()
    local_rank = dist.get_node_local_rank(fallback_rank=0)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        device_id=device if cuda else None,
        **({} if dist.is_torchelastic_launched() else alone),
    )
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if options.attention == "sdpa" and ranks > 1:
        raise SystemExit("--attention sdpa is for one process")
    if options.inject_fault:
        options.faults[options.inject_fault]()
    contents = documents(options.text)
    trainer = make_trainer(options, device)
    source: Packed | Balanced = Packed(contents, options.seq_len, trainer.shard)
    if options.balance:
        source = Balanced(contents, options, trainer.cost_model())
    trained = trainer.model, trainer.optimizer, source
    done = load(options.resume, *trained) if options.resume else 0
    rate = ranks * matmul_rate(device)
    losses, speeds, sent, figures = [], [], [], []
    for number, step in enumerate(itertools.islice(source, options.steps), done + 1):
        start, before = time.perf_counter(), trainer.sent_bytes()
        losses.append(trainer.step(step.micro_batches))
        seconds = time.perf_counter() - start
        speeds.append(step.tokens / seconds)
        sent.append(trainer.sent_bytes() - before)
        figures.append(step.figures)
        if rank == 0:
            mfu = trainer.step_flops(step.micro_batches) / seconds / rate
            line = {"step": number, "loss": losses[-1], "tokens/s": speeds[-1], "MFU": mfu}
            print(json.dumps(line | step.figures), flush=True)
        is_last = len(losses) == options.steps
        if options.save and (is_last or number % options.save_every == 0):
            save(options.save, number, *trained)
    report = {"losses": losses, "speeds": speeds, "sent": sent, "figures": figures}
    if options.report:
        report["peak"] = peak_bytes(device)
        report["longest"] = (
            longest_context(trainer, contents, options.seq_len) if options.measure_memory else 0
        )
        reports: list[dict[str, object]] = [{}] * ranks
        dist.all_gather_object(reports, report)
        if rank == 0:
            options.report.write_text(json.dumps(reports))
    dist.barrier()  # leave together: gloo may abort a process after its peers have left
    dist.destroy_process_group()


def run(options: argparse.Namespace, make_trainer: type[Trainer], plans: Plans) -> None:
    """Train once, or compare all plans, as the options ask."""
    if options.compare:
        from compare import compare

        sys.exit(compare(options, plans))
    else:
        train(options, make_trainer)


def main() -> None:
    options = parse(
        arguments(__doc__, FAULTS, None, "default: ring; with --compare: all on a 1-D group")
    )
    plans = {"1 process, 1 thread": ("sdpa", 1, 1), "1 process, 2 threads": ("sdpa", 1, 2)}
    if options.inject_fault:
        plans.pop("1 process, 2 threads")
    strategies = [options.attention] if options.attention else [*STRATEGIES, *VARIANTS]
    plans |= {
        f"{name}, {options.processes} processes": (name, options.processes, 1)
        for name in strategies
    }
    options.attention = options.attention or "ring"
    run(options, Trainer, plans)


if __name__ == "__main__":
    main()

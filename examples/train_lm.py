"""Train a byte-level language model on real text, its attention spread over processes.

One training, on 2 processes:
    torchrun --nproc-per-node 2 examples/train_lm.py --attention ring
All strategies against one process:
    python examples/train_lm.py --compare

The text is the source of Python's own standard library, or --text DIR_OR_FILE. Each file is a
document; documents are packed, at their real lengths, into batches of --seq-len tokens, and each
rank works on its part of every batch.

Two things that users get wrong:

* Labels are shifted before the batch is sharded. Afterwards the row that follows a token on a rank
  is often not the token that follows it in the document.
* The loss is averaged over the tokens of all ranks. Ranks hold different numbers of labels, so each
  divides its *sum* by the *global* count, and gradients are *summed* over ranks. (DDP and FSDP
  average gradients over ranks instead: with them, multiply the loss by the number of ranks.)
"""

import argparse
import itertools
import json
import resource
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from data import batches, documents, standard_library
from faults import FAULTS, Faults
from model import Attend, Transformer
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import seqpar

LAYOUTS = {
    "contiguous": seqpar.Layout.contiguous,
    "zigzag": seqpar.Layout.zigzag,
    "striped": seqpar.Layout.striped,
}
LEARNING_RATE = 1e-3
STRATEGIES = ["ring", "all_gather", "token_ring", "ulysses"]
# Ulysses that keeps less for backward, and sends more in it: compare how long a context may be
VARIANTS = {"ulysses-tokens": ("ulysses", {"keep": "tokens"})}
Plans = dict[str, tuple[str, int, int]]  # by label: attention, processes, threads


def sdpa_by_document(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: list[int]) -> Tensor:
    """Return attention without seqpar, to compare with: PyTorch's, a document at a time."""
    outputs = []
    for start, stop in itertools.pairwise(cu_seqlens):
        heads = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
        outputs.append(
            F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)[0].transpose(
                0, 1
            )
        )
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
        if options.attention == "usp":  # nodes of two ranks, or of one
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

    def step(self, ids: Tensor, cu_seqlens: Tensor) -> float:
        """Make one step on a packed batch; return the loss averaged over all its labels."""
        layout = self.make_layout(cu_seqlens, self.ranks)
        labels = seqpar.shift_labels(ids, cu_seqlens)  # before sharding
        count = int((labels >= 0).sum())  # of the whole batch, which every rank has read
        ids, labels = (layout.shard(x, self.rank).to(self.device) for x in (ids, labels))
        logits = self.model(ids, layout.position_ids(self.rank, self.device), self.attend(layout))
        loss = F.cross_entropy(logits, labels, reduction="sum") / count
        self.optimizer.zero_grad()
        loss.backward()
        self.sum_over_ranks([p.grad for p in self.model.parameters() if p.grad is not None])
        self.optimizer.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        return float(total)

    def sum_over_ranks(self, gradients: list[Tensor]) -> None:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(
            gradients, flat.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))

    def sent_bytes(self) -> int:
        """Return the bytes that this rank has sent for attention so far."""
        return 0 if self.attention is None else self.attention.sent_bytes


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes of memory that this rank has held so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def longest_context(
    trainer: Trainer, contents: list[bytes], tokens: int, budget: int = 2 * 2**30
) -> int:
    """Return how many tokens fit into `budget` bytes on each rank.

    That is on a line through the peaks of a step at 4 and at 8 times the length. Documents are cut
    at 512 tokens for it: memory does not depend on their lengths, and time does.
    """
    peaks = []
    for factor in (4, 8):
        ids = next(batches(contents, factor * tokens))[0]
        trainer.step(ids, torch.arange(0, len(ids) + 512, 512).clamp(max=len(ids)))
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
    losses, seconds, sent = [], [], []
    for number, (ids, cu_seqlens) in enumerate(
        itertools.islice(batches(contents, options.seq_len), options.steps)
    ):
        start, before = time.perf_counter(), trainer.sent_bytes()
        losses.append(trainer.step(ids, cu_seqlens))
        seconds.append(time.perf_counter() - start)
        sent.append(trainer.sent_bytes() - before)
        if rank == 0:
            print(
                json.dumps(
                    {
                        "step": number + 1,
                        "loss": losses[-1],
                        "tokens/s": options.seq_len / seconds[-1],
                    }
                ),
                flush=True,
            )
    report = {
        "losses": losses,
        "seconds": seconds,
        "sent": sum(sent) / len(sent),
        "peak": peak_bytes(device),
    }
    if options.report:
        report["longest"] = (
            longest_context(trainer, contents, options.seq_len) if options.measure_memory else 0
        )
        reports: list[dict[str, object]] = [{}] * ranks
        dist.all_gather_object(reports, report)
        if rank == 0:
            options.report.write_text(json.dumps(reports))
    dist.barrier()  # leave together: gloo may abort a process whose peers are gone before it
    dist.destroy_process_group()


def arguments(
    description: str | None, faults: Faults, attention: str | None, attention_help: str
) -> argparse.ArgumentParser:
    """Return a parser of the options of every training.

    `passed_on` names those that --compare passes on to each of its runs.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(faults=faults, passed_on=["layout", "seq_len", "steps", "text"])
    parser.add_argument(
        "--attention",
        choices=[*STRATEGIES, *VARIANTS, "usp", "sdpa"],
        default=attention,
        help=attention_help,
    )
    parser.add_argument(
        "--layout", choices=sorted(LAYOUTS), default="zigzag", help="which tokens each rank holds"
    )
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens in a packed batch")
    parser.add_argument(
        "--steps", type=int, default=None, help="training steps (default: 60; 10 with a fault)"
    )
    parser.add_argument(
        "--text", type=Path, default=standard_library(), help="a folder or file to train on"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads a process")
    parser.add_argument(
        "--compare", action="store_true", help="train on several processes and on one, and compare"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=2,
        help="with --compare: how many processes the strategies run on",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo-out"),
        help="with --compare: where the loss curves go",
    )
    parser.add_argument(
        "--inject-fault",
        choices=sorted(faults),
        help="plant a fault in the strategies; --compare must fail",
    )
    parser.add_argument(
        "--list-faults", action="store_true", help="print the faults' names and stop"
    )
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure-memory", action="store_true", help=argparse.SUPPRESS)
    return parser


def parse(parser: argparse.ArgumentParser, positive: Sequence[str] = ()) -> argparse.Namespace:
    """Return the options, or exit if a count, such as those named `positive`, is below 1."""
    options = parser.parse_args()
    for name in ("seq_len", "threads", "processes", *positive):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    options.steps = options.steps or (10 if options.inject_fault else 60)
    return options


def run(options: argparse.Namespace, make_trainer: type[Trainer], plans: Plans) -> None:
    """Do what the options ask for: train once, compare all plans, or print the faults' names."""
    if options.list_faults:
        print(*options.faults, sep="\n")
    elif options.compare:
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

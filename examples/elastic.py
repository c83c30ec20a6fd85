"""Train a small model on ranks that die. The other ranks continue, and spares replace dead ranks.

python -m seqpar elastic --ranks 4 --spares 1 --restarts 3 examples/elastic.py --kill 3:0 6:2 9:1

`--kill STEP:RANK` kills a rank once. Without spares, the group has fewer ranks after that, and
losses differ from those of a training without faults only by rounding.
"""

import argparse
import os
import signal
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import Transformer

import seqpar

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--timeout", type=float, default=10, help="seconds; the group's")
parser.add_argument("--kill", nargs="*", default=[], metavar="STEP:RANK")
parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), str(os.getppid())))
options = parser.parse_args()
torch.set_num_threads(1)
options.folder.mkdir(exist_ok=True)  # files in it record which ranks have been killed


def die(step, rank, where):
    """Kill this rank if --kill names this step and rank. Called at three places of a step."""
    note = options.folder / f"killed-{step}"
    places = "before forward", "before the sum of gradients", "after the step"
    if f"{step}:{rank}" in options.kill and where == places[step % 3] and not note.exists():
        note.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def build(group):
    torch.manual_seed(0)
    model = Transformer(dim=32, layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    attn, rank, ranks = seqpar.RingAttention(group), group.rank(), group.size()

    def step(i):
        die(i, rank, "before forward")
        generator = torch.Generator().manual_seed(i)
        lengths = torch.randint(8, 40, (4,), generator=generator)  # documents change every step
        tokens = torch.randint(256, (int(lengths.sum()),), generator=generator)
        layout = seqpar.Layout.zigzag([0, *lengths.cumsum(0).tolist()], ranks)
        local = layout.shard(tokens, rank)
        positions = layout.position_ids(rank)
        logits = model(local, positions, lambda q, k, v: attn(q, k, v, layout, causal=True))
        loss = F.cross_entropy(logits, local, reduction="sum") / len(tokens)
        optimizer.zero_grad()
        loss.backward()
        die(i, rank, "before the sum of gradients")
        summed = torch.cat([loss.detach().view(1), *(x.grad.flatten() for x in model.parameters())])
        dist.all_reduce(summed, group=group)
        parts = summed[1:].split([x.numel() for x in model.parameters()])
        for x, part in zip(model.parameters(), parts, strict=True):
            x.grad.copy_(part.view_as(x))
        optimizer.step()
        die(i, rank, "after the step")
        return summed[0].item()

    return {"model": model, "optimizer": optimizer}, step


for i, loss in seqpar.elastic.steps(
    build, options.steps, timeout=timedelta(seconds=options.timeout)
):
    print(f"step {i}, loss {loss!r}", flush=True)

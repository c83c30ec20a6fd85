"""Measure what `seqpar.parity.record` adds to a training step, in time and in bytes.

A transformer takes steps with AdamW in one process of one thread. Steps with a recording and steps
without one alternate. Times are CPU times of the process, and include the time to write the files.
Figures are medians in seconds, and the ratio of the medians.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import harness
from seqpar import parity

HEADS, LAYERS, VOCABULARY = 4, 4, 1000
SIZES = (128, 512), (128, 2048), (512, 512)  # width, tokens


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = (
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(self.norm2(x))))


def compared(width: int, tokens: int, steps: int) -> dict[str, Any]:
    """Return a row of the result: times of steps with and without a recording, and its bytes."""
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, VOCABULARY, (1, tokens))
    times: dict[str, list[float]] = {"with": [], "without": []}
    size = 0
    for i, case in harness.turns(times, steps + 1):
        with tempfile.TemporaryDirectory() as folder:
            begin = time.process_time()
            recorded = parity.record(Path(folder) / "run", model)
            with recorded if case == "with" else nullcontext():
                F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
            if i:  # the first steps warm up
                times[case].append(time.process_time() - begin)
            size = max(size, sum(x.stat().st_size for x in Path(folder).rglob("*.*")))
    seconds = {case: statistics.median(x) for case, x in times.items()}
    ratio = seconds["with"] / seconds["without"]
    return {"width": width, "tokens": tokens, **seconds, "ratio": ratio, "bytes": size}


def measure(options: Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    rows = [compared(*size, options.steps) for size in SIZES]
    cells = [
        [
            f"{row['width']}",
            f"{row['tokens']:,}",
            f"{row['without']:.2f}",
            f"{row['with']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['bytes'] / 1e6:.1f}",
        ]
        for row in rows
    ]
    head = ["width", "tokens", "s without", "s with", "ratio", "MB"]
    print(harness.table(head, cells))
    return {"rows": rows}


ARGUMENTS = {"--steps": (9, "steps of each kind after one to warm up")}

if __name__ == "__main__":
    harness.run("recording", __doc__, ARGUMENTS, measure, canary_is="none")

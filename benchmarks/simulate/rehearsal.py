"""Rehearse a recipe's script on this machine, and compare its memory with the predicted memory.

Two processes run one step of the script that `python -m seqpar recipe` prints, with a Qwen3 of 2
layers and 2 heads of 64 in bf16, on one document of each length. The peak of resident memory grows
with the length. The benchmark compares this growth with the growth that the recipe predicts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models

from benchmarks import harness
from seqpar.costs.costs import Costs
from seqpar.costs.model import Model
from seqpar.recipes.memory_account import Keeping
from seqpar.recipes.recipe import MODELS, Published, Recipe, as_gpus, predicted
from seqpar.recipes.scripts import script

CONFIG = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2**20,
}
ALLOWED_BYTES = 8 * 2**30  # of both processes together
ALLOWED_GROWTH = 1.05  # of the predicted growth
# Large tensors get pages of their own, which return to the system when a tensor is freed. Resident
# memory is then the memory of tensors, without the caches of malloc.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def small_recipe(tokens: int) -> Recipe:
    """Return the rehearsed recipe. Times of its predictions mean nothing."""
    model = Model.from_config(CONFIG | {"model_type": "qwen3"})
    costs = Costs(replace(as_gpus("8xh100"), devices_per_node=2), model)
    published = Published(MODELS["qwen3-8b"].repository, head_norms=True)
    return predicted(published, costs, (tokens,), "ulysses", "contiguous", Keeping(True, 0.0))


def write_model(folder: Path) -> None:
    """Write the small model, a tokenizer of bytes, and a text of one document."""
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**CONFIG)).save_pretrained(folder)
    words = {f"<{i}>": i for i in range(4)} | {f"<0x{i:02X}>": i + 4 for i in range(256)}
    made = Tokenizer(models.BPE(vocab=words, merges=[], byte_fallback=True))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<3>")
    tokenizer.save_pretrained(folder)
    text = " ".join(f"The square of {i} is {i * i}." for i in range(2**14))
    (folder / "text").write_text(text + "\n")


def rehearse(folder: Path, tokens: int) -> dict[str, Any]:
    """Run one step of the script with this number of tokens on two processes."""
    file = folder / "train.py"
    file.write_text(script(small_recipe(tokens), "plain"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(file), "--model", str(folder), "--steps=1"]
    command += ["--text", str(folder / "text"), "--tokens", str(tokens)]
    command += ["--chunk=1024", "--loss-chunk=1024", "--save", str(folder / "saved")]
    run = subprocess.run(
        command,
        env=os.environ | MALLOC | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    (line,) = (json.loads(x) for x in run.stdout.splitlines() if x.startswith('{"step"'))
    row = {"tokens": tokens, "bytes": line["peak GB"] * 1e9, "seconds": line["seconds"]}
    row |= {"loss": line["loss"], "predicted_bytes": small_recipe(tokens).memory.total}
    print(f"{tokens:9,} tokens: {row['bytes'] / 1e9:.3f} GB per process, {row['seconds']:.0f} s")
    return row


def measure(options: Namespace) -> harness.Results:
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        return summary([rehearse(Path(folder), tokens) for tokens in options.lengths])


def summary(rows: list[dict[str, Any]]) -> harness.Results:
    """Return the rows, the growth in bytes per token of a process, and whether both goals hold."""
    first, last = rows[0], rows[-1]
    tokens = (last["tokens"] - first["tokens"]) / 2
    growth = {x: (last[x] - first[x]) / tokens for x in ("bytes", "predicted_bytes")}
    print(f"bytes per token: {growth['bytes']:,.0f}, predicted {growth['predicted_bytes']:,.0f}")
    return {
        "rows": rows,
        "bytes_per_token": growth,
        "fits": 2 * last["bytes"] <= ALLOWED_BYTES,
        "grows_as_predicted": growth["bytes"] <= ALLOWED_GROWTH * growth["predicted_bytes"],
    }


def tables(results: harness.Results) -> dict[str, str]:
    """Return the tables of docs/guides/million_tokens.md from the results."""
    rows = [[f"{x['tokens']:,}", f"{x['bytes'] / 1e9:.2f}"] for x in results["rows"]]
    growth = [f"{x:,.0f}" for x in results["bytes_per_token"].values()]
    return {
        "rehearsal": harness.table(["tokens", "GB per process"], rows),
        "growth": harness.table(["bytes per token, measured", "predicted"], [growth]),
    }


ARGUMENTS = {"--lengths": ([2**15, 2**18], "tokens of rehearsed steps")}

if __name__ == "__main__":
    harness.run("rehearsal", __doc__, ARGUMENTS, measure, canary_is="none")

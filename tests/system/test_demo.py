"""The main job, small: it agrees with one process, and it notices every fault that is planted."""

import ast
import bisect
import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
import token
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]


def demo(folder, *arguments, example="train_lm"):
    """Run an example in `folder`, on this tree's seqpar wherever that is installed."""
    command = [sys.executable, str(ROOT / "examples" / f"{example}.py"), *arguments]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    options = {"cwd": folder, "env": os.environ | {"PYTHONPATH": path}, "timeout": 110}
    return subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A few files of real text, as --text takes them."""
    folder = tmp_path_factory.mktemp("text")
    for module in (bisect, textwrap, token):
        (folder / f"{module.__name__}.py").write_text(Path(module.__file__).read_text())
    return folder


@pytest.mark.exhaustive
def test_two_processes_train_as_one_does(text, tmp_path):
    training = ("--attention=ulysses", "--layout=striped", "--steps=3", "--seq-len=300")
    done = demo(tmp_path, "--compare", *training, f"--text={text}", f"--out={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ulysses, 2 processes" in done.stdout
    assert (tmp_path / "loss.png").stat().st_size > 1000


@pytest.mark.exhaustive
def test_two_processes_train_the_hybrid_as_plain_pytorch_does(text, tmp_path):
    training = ("--transport=scan", "--steps=3", "--seq-len=300", f"--text={text}")
    done = demo(tmp_path, "--compare", *training, f"--out={tmp_path}", example="train_hybrid")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all_gather, 1 process " in done.stdout and "all_gather, 2 processes" in done.stdout


HYBRID = ("--layers=3", "--softmax-every=2", "--norm=none", "--gate=off")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("example", "model"), [("train_lm", ()), ("train_hybrid", HYBRID)])
def test_one_training_without_torchrun(text, tmp_path, example, model):
    training = ("--attention=all_gather", "--steps=2", "--seq-len=100")
    done = demo(tmp_path, *training, f"--text={text / 'token.py'}", *model, example=example)
    assert done.returncode == 0 and done.stdout.count('"loss"') == 2, done.stderr


@pytest.mark.exhaustive
def test_a_planted_fault_is_noticed(text, tmp_path):
    """One of the five; CI runs all of them."""
    training = ("--attention=ring", "--steps=4", "--seq-len=300", f"--text={text}")
    done = demo(tmp_path, "--compare", "--inject-fault=bf16-dkdv", *training)
    shown = done.stdout + done.stderr
    assert done.returncode == 1 and "departs from that of one process" in done.stdout, shown


@pytest.mark.exhaustive
def test_a_planted_fault_of_linear_attention_is_noticed(text, tmp_path):
    training = ("--steps=2", "--seq-len=300", f"--text={text}")
    fault = ("--compare", "--inject-fault=state-dropped")
    done = demo(tmp_path, *fault, *training, example="train_hybrid")
    shown = done.stdout + done.stderr
    assert done.returncode == 1 and "departs from that of one process" in done.stdout, shown


@pytest.fixture
def here(monkeypatch):
    """Call an example's `main` in this process, as with these arguments."""
    monkeypatch.syspath_prepend(ROOT / "examples")

    def call(example, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{example}.py", *arguments])
        importlib.import_module(example).main()

    yield call
    if dist.is_initialized():  # where an example stopped early
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text=/nowhere"], "there is no /nowhere"),
        (["--seq-len=0"], "--seq-len must be at least 1"),
        (["--attention=rings"], "invalid choice"),
        (["--inject-fault=cosmic-ray"], "invalid choice"),
    ],
)
def test_bad_arguments_are_refused(here, capsys, arguments, message):
    with pytest.raises(SystemExit) as refusal:
        here("train_lm", *arguments)
    assert refusal.value.code
    assert message in f"{refusal.value}{capsys.readouterr().err}"


@pytest.mark.parametrize(("example", "model"), [("train_lm", ()), ("train_hybrid", HYBRID)])
def test_one_training_in_this_process(here, capsys, text, example, model):
    """The cheaper row of all that trains: a few steps, and the loss falls."""
    training = ("--attention=all_gather", "--steps=3", "--seq-len=100")
    here(example, *training, f"--text={text / 'token.py'}", *model)
    losses = [json.loads(line)["loss"] for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 3 and losses[0] > losses[-1]


@pytest.mark.parametrize("example", ["train_lm", "train_hybrid"])
def test_help_shows_commands_that_can_be_copied(example):
    """`--help` prints an example's docstring as it is: a command is an indented line."""
    text = ast.get_docstring(ast.parse((ROOT / "examples" / f"{example}.py").read_text()))
    program = rf"(torchrun --nproc-per-node 2|python) examples/{example}\.py"
    command = re.compile(rf"    {program} --\w+( \w+)?")
    mentions = [line for line in text.splitlines() if f"examples/{example}.py" in line]
    assert len(mentions) == 2 and all(map(command.fullmatch, mentions)), mentions

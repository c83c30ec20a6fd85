"""The main job, small: it agrees with one process, and it notices every fault that is planted."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def demo(*arguments, example="train_lm"):
    command = [sys.executable, str(ROOT / "examples" / f"{example}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A few files of real text, as --text takes them."""
    folder = tmp_path_factory.mktemp("text")
    for name in ("mask.py", "comm.py", "layout.py"):
        (folder / name).write_text((ROOT / "seqpar" / name).read_text())
    return folder


def test_two_processes_train_as_one_does(text, tmp_path):
    training = ("--attention=ulysses", "--layout=striped", "--steps=3", "--seq-len=300", f"--text={text}")
    done = demo("--compare", *training, f"--out={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ulysses, 2 processes" in done.stdout and (tmp_path / "loss.png").stat().st_size > 1000


def test_two_processes_train_the_hybrid_as_plain_pytorch_does(text, tmp_path):
    training = ("--transport=scan", "--steps=3", "--seq-len=300", f"--text={text}")
    done = demo("--compare", *training, f"--out={tmp_path}", example="train_hybrid")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all_gather, 1 process " in done.stdout and "all_gather, 2 processes" in done.stdout


@pytest.mark.parametrize(
    ("example", "model"), [("train_lm", ()), ("train_hybrid", ("--layers=3", "--softmax-every=2", "--norm=none", "--gate=off"))]
)
def test_one_training_without_torchrun(text, example, model):
    training = ("--attention=all_gather", "--steps=2", "--seq-len=100", f"--text={text / 'mask.py'}")
    done = demo(*training, *model, example=example)
    assert done.returncode == 0 and done.stdout.count('"loss"') == 2, done.stderr


def test_a_planted_fault_is_noticed(text):
    """One of the five; CI runs all of them."""
    done = demo("--compare", "--inject-fault=bf16-dkdv", "--attention=ring", "--steps=4", "--seq-len=300", f"--text={text}")
    assert done.returncode == 1 and "departs from that of one process" in done.stdout, done.stdout + done.stderr


def test_a_planted_fault_of_linear_attention_is_noticed(text):
    training = ("--steps=2", "--seq-len=300", f"--text={text}")
    done = demo("--compare", "--inject-fault=state-dropped", *training, example="train_hybrid")
    assert done.returncode == 1 and "departs from that of one process" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text=/nowhere"], "there is no /nowhere"),
        (["--seq-len=0"], "--seq-len must be at least 1"),
        (["--attention=rings"], "invalid choice"),
        (["--inject-fault=cosmic-ray"], "invalid choice"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    done = demo(*arguments)
    assert done.returncode != 0 and message in done.stderr

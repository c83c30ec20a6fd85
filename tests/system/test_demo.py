"""The main job, small: it agrees with one process, and it notices every fault that is planted."""

import argparse
import ast
import bisect
import dataclasses
import importlib
import json
import re
import subprocess
import sys
import textwrap
import token
from pathlib import Path

import pytest
import torch.distributed as dist

from seqpar import balance
from tests.support.commands import TORCHRUN, Forked, fork_commands
from tests.support.faults import free_port
from tests.support.servers import running

ROOT = Path(__file__).parents[2]
HANG = 850  # seconds after which a training hangs, on a busy machine too
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def forked(monkeypatch, tmp_path):
    """Call an example in a process, which forks all that it starts: its exit status and output."""

    def call(example, *arguments):
        fork_commands(monkeypatch)
        command = [sys.executable, str(ROOT / "examples" / f"{example}.py"), *arguments]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(command, **options, cwd=tmp_path)
        with process.stdout as output:
            shown = output.read()
        return process.wait(HANG), shown

    return call


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A few files of real text, as --text takes them."""
    folder = tmp_path_factory.mktemp("text")
    for module in (bisect, textwrap, token):
        (folder / f"{module.__name__}.py").write_text(Path(module.__file__).read_text())
    return folder


@pytest.mark.exhaustive
def test_two_processes_train_as_one_does(text, forked, tmp_path):
    """CI also runs this example as a user starts it."""
    training = ("--attention=ulysses", "--layout=striped", "--steps=3", "--seq-len=100")
    code, shown = forked("train_lm", "--compare", *training, f"--text={text}", f"--out={tmp_path}")
    assert code == 0, shown
    assert re.search(r"^ulysses, 2 processes: 3 steps, loss \d", shown, re.MULTILINE)
    assert (tmp_path / "loss.png").stat().st_size > 1000


@pytest.mark.exhaustive
def test_a_planted_fault_of_linear_attention_is_noticed(text, forked):
    training = ("--steps=2", "--seq-len=300", f"--text={text}")
    fault = ("--compare", "--inject-fault=state-dropped")
    code, shown = forked("train_hybrid", *fault, *training)
    assert code == 1 and "differs from one process's" in shown, shown


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A file of a cluster that computes in fp32, as the examples do; nothing is measured.

    It is so slow that few tokens take long, as they do where documents are long.
    """
    found = balance.Cluster.preset("1x8-h100")
    path = tmp_path_factory.mktemp("cluster") / "cluster.json"
    device = dataclasses.replace(found.device, dtype="float32", matmul_rate=1e9)
    dataclasses.replace(found, device=device).to_json(path)
    return path


def trained(ranks, folder, *arguments, example="train_lm"):
    """Train on this number of forked processes; return each rank's report."""
    report, torchrun = folder / "report.json", [*TORCHRUN, f"--nproc-per-node={ranks}"]
    script = str(ROOT / "examples" / f"{example}.py")
    assert Forked([*torchrun, script, *arguments, f"--report={report}"]).wait(HANG) == 0
    return json.loads(report.read_text())


@pytest.mark.exhaustive
def test_processes_train_the_hybrid_as_plain_pytorch_does(text, tmp_path, monkeypatch):
    """By what losses may depart `--compare` says."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    compare = importlib.import_module("compare")
    training = ("--transport=tree", "--steps=3", "--seq-len=300")
    training += ("--linear=gated_delta", f"--text={text}")
    plans = [("sdpa", 1), ("all_gather", 1), ("all_gather", 2)]
    reference, *others = (
        trained(ranks, tmp_path, f"--attention={name}", *training, example="train_hybrid")
        for name, ranks in plans
    )
    for found in others:
        assert compare.departure(found, reference) <= compare.TOLERANCE


def test_a_log_has_a_line_after_each_run(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    compare = importlib.import_module("compare")
    begun = []

    def run(options, attention, processes, threads, progress):
        begun.append(len(capsys.readouterr().out.splitlines()))
        progress({"step": 2, "loss": 1.5, "tokens/s": 1000.0})
        sizes = {"sent": [0], "peak": 0, "longest": 0}
        return [{"losses": [2.0, 1.5], "speeds": [1000.0, 1000.0]} | sizes]

    monkeypatch.setattr(compare, "run", run)
    plans = {f"run {i}": ("ring", 1, 1) for i in range(9)}
    options = argparse.Namespace(
        steps=2, inject_fault=None, out=tmp_path, seq_len=7, balance=None, layout="zigzag"
    )
    assert compare.compare(options, plans) == 0
    assert begun == [0, *[1] * 8]
    last, *_ = capsys.readouterr().out.splitlines()
    assert last == "run 8: 2 steps, loss 1.5000, 1,000 tokens/s"
    from matplotlib import pyplot

    widths = [line.get_linewidth() for line in pyplot.gca().lines]
    pyplot.close()
    assert len(widths) == 9 and min(widths) >= 1 and widths == sorted(widths, reverse=True)


@pytest.mark.exhaustive
def test_every_planted_fault_is_noticed(text, tmp_path, monkeypatch):
    """By what `--compare` compares. Without a fault the losses are alike."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    compare, faults = map(importlib.import_module, ("compare", "faults"))
    training = ("--steps=4", "--seq-len=300", f"--text={text}")
    reference = trained(1, tmp_path, "--attention=sdpa", *training)
    noticed = {}
    for fault in ["", *faults.FAULTS]:
        options = (f"--inject-fault={fault}",) if fault else ()
        found = trained(2, tmp_path, "--attention=ring", *training, *options)
        noticed[fault] = compare.departure(found, reference) > compare.TOLERANCE
    assert noticed == {fault: fault != "" for fault in ["", *faults.FAULTS]} and len(noticed) == 6


@pytest.fixture(scope="module")
def uneven(text, cluster):
    """Options of a training on balanced documents, whatever the ranks and the planner."""
    return f"--text={text}", f"--cluster={cluster}", "--seq-len=1000"


@pytest.fixture(scope="module")
def alone(uneven, tmp_path_factory):
    """The losses of four such steps in one process without seqpar's attention."""
    options = ("--attention=sdpa", "--balance=auto", "--steps=4")
    (report,) = trained(1, tmp_path_factory.mktemp("alone"), *uneven, *options)
    assert {figures["micro-batches"] for figures in report["figures"]} == {1}
    return report["losses"]


@pytest.mark.exhaustive
def test_balanced_documents_train_as_in_one_process(uneven, alone, tmp_path):
    """Also in several micro-batches, and from a file that another number of ranks wrote."""
    file, close = tmp_path / "saved", 1e-6
    first = trained(
        2, tmp_path, *uneven, "--balance=bytescale", "--capacity=300", "--steps=2", f"--save={file}"
    )
    assert first[0]["losses"] == first[1]["losses"] == pytest.approx(alone[:2], rel=close)
    figures = first[0]["figures"]
    assert {x["micro-batches"] for x in figures} == {2}
    sent = [sum(pair) for pair in zip(*(rank["sent"] for rank in first), strict=True)]
    assert sent == [x["bytes"] for x in figures] and max(sent) > 0
    assert all(x["max/mean"] >= 1 >= x["of the bound"] > 0 for x in figures)
    options = ("--balance=zeppelin", "--steps=2", f"--resume={file}")
    (second,) = trained(1, tmp_path, *uneven, *options)
    assert second["losses"] == pytest.approx(alone[2:], rel=close)


@pytest.mark.exhaustive
def test_the_hybrid_is_compared_on_balanced_documents(uneven, forked, tmp_path):
    options = ("--compare", "--balance=auto", "--steps=2", "--processes=3", *uneven)
    options += ("--attention=token_ring", "--seq-len=300", f"--out={tmp_path}")
    code, shown = forked("train_hybrid", *options)
    assert code == 0 and "balanced by auto" in shown, shown
    assert "token_ring, 1 process " in shown and "token_ring, 3 processes" in shown


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
        (["--text=/nowhere"], "--text: /nowhere does not exist"),
        (["--seq-len=0"], "--seq-len must be at least 1"),
        (["--attention=rings"], "invalid choice"),
        (["--balance=evenly"], "invalid choice"),
        (["--capacity=0"], "--capacity must be at least 1"),
        (["--cluster=/nowhere"], "--cluster: /nowhere does not exist"),
        (["--resume=/nowhere"], "--resume: /nowhere does not exist"),
        (["--resume=/usr"], "--resume: /usr has no checkpoint"),
        (["--steps=0"], "--steps must be at least 1"),
        (["--save-every=0"], "--save-every must be at least 1"),
        (["--inject-fault=cosmic-ray"], "invalid choice"),
    ],
)
def test_bad_arguments_are_refused(here, capsys, arguments, message):
    with pytest.raises(SystemExit) as refusal:
        here("train_lm", *arguments)
    assert refusal.value.code
    assert message in f"{refusal.value}{capsys.readouterr().err}"


HYBRID = ("--layers=3", "--softmax-every=2", "--norm=none", "--gate=off")


@pytest.mark.parametrize(("example", "model"), [("train_lm", ()), ("train_hybrid", HYBRID)])
def test_one_training_in_this_process(here, capsys, text, example, model):
    """The cheaper row of all that trains: a few steps, and the loss falls."""
    training = ("--attention=all_gather", "--steps=3", "--seq-len=100")
    here(example, *training, f"--text={text / 'token.py'}", *model)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    losses = [line["loss"] for line in lines]
    assert len(losses) == 3 and losses[0] > losses[-1]
    assert all(0 < line["MFU"] < 1 for line in lines)


def test_training_continues_from_the_last_complete_checkpoint(here, capsys, text, tmp_path):
    training = ("--seq-len=100", f"--text={text / 'token.py'}")
    here("train_lm", *training, "--steps=5", f"--save={tmp_path}", "--save-every=2")
    checkpoints = importlib.import_module("checkpoints")
    assert sorted(checkpoints.completed(tmp_path)) == [2, 4, 5]
    (tmp_path / "5" / checkpoints.METADATA).unlink()  # as if the program ended while it was saved
    here("train_lm", *training, "--steps=1", f"--resume={tmp_path}")
    *whole, continued = map(json.loads, capsys.readouterr().out.splitlines())
    assert continued["step"] == whole[-1]["step"] == 5
    assert continued["loss"] == pytest.approx(whole[-1]["loss"], rel=1e-6)
    with pytest.raises(SystemExit):  # --resume would continue from the later checkpoints in it
        here("train_lm", *training, "--steps=1", f"--save={tmp_path}")
    assert "has checkpoints of another run" in capsys.readouterr().err


def test_one_training_with_a_server(here, capsys, text, tmp_path, monkeypatch):
    environment = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (environment | {"MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)
    with running(f"ipc://{tmp_path}/0") as server:
        training = ("--steps=3", "--tokens=100", f"--text={text / 'token.py'}")
        here("train_disaggregated", f"--servers={server.address}", *training)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 3 and lines[0]["loss"] > lines[-1]["loss"]
    assert lines[-1]["tasks"] == {server.address: 18, "home": 0}  # 3 layers, forward and backward


@pytest.mark.exhaustive
def test_a_killed_server_changes_no_bit_of_training(text, forked, tmp_path):
    training = ("--compare", "--trainers=1", "--steps=40", "--tokens=100", f"--text={text}")
    code, shown = forked("train_disaggregated", *training, f"--out={tmp_path}")
    assert code == 0 and "the losses of all 40 steps are the same, bit for bit" in shown, shown
    assert re.search(r"^undisturbed: 40 steps, loss \d", shown, re.MULTILINE)
    assert "killed" in shown and (tmp_path / "loss_servers.png").stat().st_size > 1000


@pytest.mark.parametrize("example", ["train_lm", "train_hybrid", "train_disaggregated"])
def test_help_shows_commands_that_can_be_copied(example):
    """`--help` prints an example's docstring as it is: a command is an indented line."""
    text = ast.get_docstring(ast.parse((ROOT / "examples" / f"{example}.py").read_text()))
    program = rf"(torchrun --nproc-per-node 2|python) examples/{example}\.py"
    command = re.compile(rf"    {program}( --\w+( \S+)?)?")
    mentions = [line for line in text.splitlines() if f"examples/{example}.py" in line]
    assert len(mentions) >= 2 and all(map(command.fullmatch, mentions)), mentions

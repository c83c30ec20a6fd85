"""`python -m seqpar bench` as its users start it, on two processes."""

import json
import os
import signal
import subprocess
import sys

import pytest

from seqpar.bench.workers.ranks import PointError, RankProcesses
from seqpar.comm.launch import place
from tests.support.commands import TORCHRUN, fork_commands
from tests.support.faults import LIMIT
from tests.support.sweeps import options

WORDS = ["bench", "--strategies", "ring,usp", "--peers", "all-to-all-by-hand", "--lengths", "256",
         "--heads", "4:2x8", "--ranks", "2", "--device", "cpu"]  # fmt: skip


def command(*words, launcher=()):
    environment = {name: x for name, x in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "seqpar", *WORDS, *words], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=environment | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_an_interrupted_sweep_goes_on_and_is_whole(tmp_path, monkeypatch):
    fork_commands(monkeypatch)
    words = ["--folder", str(tmp_path), "--rounds", "50"]  # some must be left to interrupt
    first = command(*words)
    for line in first.stderr:
        if "round 1" in line:
            first.send_signal(signal.SIGINT)
            break
    errors = first.communicate(timeout=4 * LIMIT)[1]
    assert first.returncode == 130, errors
    before = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert len(before) == 4 and all(row["check"] and row["costs"] for row in before)
    again = command(*words, "--json")
    text, errors = again.communicate(timeout=4 * LIMIT)
    assert again.returncode == 0, errors
    found = json.loads(text)
    for row, known in zip(found["rows"], before, strict=True):
        assert row["failed"] is None and len(row["seconds"]) == 50
        assert row["check"] == known["check"] and row["costs"] == known["costs"]
        assert row["seconds"][: len(known["seconds"])] == known["seconds"]
    figures = {row["contender"]: row["figures"] for row in found["rows"]}
    assert figures["ring"]["bytes"] > 0 and figures["ring"]["exposed_seconds"] is not None
    assert figures["all-to-all-by-hand"]["of_ideal"] > 0 and figures["usp"]["memory"]
    assert found["links"]["pairs"][0]["ranks"] == [0, 1]
    assert (tmp_path / "bench.md").exists() and [*tmp_path.glob("breakdown-*.png")]


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_a_sweep_under_torchrun(tmp_path, monkeypatch):
    fork_commands(monkeypatch)
    launcher = (*TORCHRUN, "--nproc-per-node=2")
    words = ["--folder", str(tmp_path), "--rounds", "2", "--json", "--strategies", "ring"]
    run = command(*words, launcher=launcher)
    text, errors = run.communicate(timeout=6 * LIMIT)
    assert run.returncode == 0, errors
    found = json.loads(text)
    assert all(row["failed"] is None for row in found["rows"]) and len(found["rows"]) == 3


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_ranks_that_die_hang_or_refuse_are_replaced(monkeypatch):
    assert place() is None
    fork_commands(monkeypatch)
    small, large = (
        options(lengths=[tokens], ranks=["2"], peers=["all-to-all-by-hand"]).workloads()[0]
        for tokens in ("32", "65536")
    )
    time = {"do": "time", "workload": small.as_dict(), "contender": "ring"}
    with RankProcesses(None, 2, "cpu") as ranks:
        assert min(ranks.ask(2, time, LIMIT)) > 0
        with pytest.raises(
            PointError, match="refused: the number of ranks must divide the KV heads, got 1"
        ):
            ranks.ask(2, time | {"contender": "all-to-all-by-hand"}, LIMIT)
        assert ranks._started == 1  # they have gone on
        with pytest.raises(PointError, match=r"it took more than 0\.5 s"):
            ranks.ask(2, time | {"workload": large.as_dict()}, 0.5)
        assert min(ranks.ask(2, time, LIMIT)) > 0
        ranks._own._running[1][0].kill()
        with pytest.raises(PointError, match="rank 1 was killed, as the system does"):
            ranks.ask(2, time, LIMIT)
        assert min(ranks.ask(2, time, LIMIT)) > 0 and ranks._started == 3

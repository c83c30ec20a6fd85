"""Plans that run in steps: what a start runs, what it reports, and where the next one goes on."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.tools import steps
from tests.tools.steps import Plan, Step


@pytest.fixture(autouse=True)
def begin_at_any_time(monkeypatch):
    monkeypatch.setattr(steps, "_LEAST", 0.0)


def step(name, code, seconds=20.0, **options):
    return Step(name, (sys.executable, "-S", "-c", code), seconds, **options)


def statuses(plan):
    return [plan.state.get(x.name, {}).get("status") for x in plan.steps]


def count(file):
    """Code that counts in a file how often it ran, as n."""
    return f"f = open({str(file)!r}, 'a+'); f.write('x'); f.flush(); f.seek(0); n = len(f.read())\n"


def test_a_failure_is_reported_and_the_next_starts(tmp_path, capfd):
    plan = Plan(
        [
            step("right", "print('fine')"),
            step("wrong", "print('why'); raise SystemExit(3)"),
            step("crash", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
            step("hangs", "import time; time.sleep(60)", seconds=0.3),
            step("left out", "raise SystemExit(1)", skipped="needs 2 GPUs"),
            step("last", "print('end')", environment={"X": "1"}),
        ],
        tmp_path / "results",
    )
    assert not plan.start() and not plan.succeeded
    assert statuses(plan) == ["done", "failed", "failed", "timed out", "skipped", "done"]
    printed = capfd.readouterr().out
    for line in ("exit status 3", "signal SIGSEGV", "stopped after 0 s", "needs 2 GPUs", "why"):
        assert line in printed
    log = (tmp_path / "results/log.txt").read_text()
    assert "fine" in log and "end" in log
    assert json.loads((tmp_path / "results/state.json").read_text()) == plan.state


def test_a_second_start_goes_on(tmp_path):
    """What is done or failed stays so; what ran out of time runs again, and then is done."""
    slow = count(tmp_path / "slow") + "import time; time.sleep(60 if n < 2 else 0)"
    all_steps = [
        step("done", count(tmp_path / "done")),
        step("failed", count(tmp_path / "failed") + "raise SystemExit(1)"),
        step("slow", slow, seconds=0.5),
    ]
    assert not Plan(all_steps, tmp_path).start()
    second = Plan(all_steps, tmp_path)
    assert second.start() and statuses(second) == ["done", "failed", "done"]
    assert [len((tmp_path / x.name).read_text()) for x in all_steps] == [1, 1, 2]
    third = Plan(all_steps, tmp_path)
    assert third.start(again=["failed"]) and third.start(again=["done"])
    assert [len((tmp_path / x.name).read_text()) for x in all_steps] == [2, 2, 2]


def test_a_start_ends_when_its_time_is_up(tmp_path):
    """The step that it cut off does not count as one that ran out of its own time."""
    sleeps = step("sleeps", count(tmp_path / "sleeps") + "import time; time.sleep(60)")
    plan = Plan([sleeps, step("next", "")], tmp_path)
    began = time.monotonic()
    for _ in range(steps.STARTS + 1):
        assert not plan.start(seconds=0.2)
    assert time.monotonic() - began < 20
    assert statuses(plan) == ["cut off", None]


def test_a_killed_run_leaves_a_resumable_state(tmp_path):
    """The runner dies in the middle of a step, as when a machine is taken back."""
    code = f"""
import sys; sys.path.insert(0, {os.getcwd()!r})
from tests.tools.steps import Plan, Step
Plan([Step("first", ("true",)), Step("second", ("sleep", "1"))], {str(tmp_path)!r}).start()
"""
    runner = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        file = tmp_path / "state.json"
        if file.is_file() and "second" in json.loads(file.read_text()):
            break
        time.sleep(0.02)
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    plan = Plan([Step("first", ("false",)), Step("second", ("true",))], tmp_path)
    assert statuses(plan) == ["done", "running"]
    assert plan.start() and plan.succeeded

"""Run a plan in steps of limited time, so that it can be stopped and started again.

Each step is a process. A state file in a folder says how each went; all that they print goes to one
log. A start goes on where the last one stopped: it runs what was not begun, was cut off or ran out
of time, and leaves alone what is done or failed. A step that fails, crashes or runs out of time is
reported, and the next one goes on. A step that exits with `MORE` is begun again at once: it has
written some of its results, and goes on behind them.
"""

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

STEP_SECONDS = 540.0  # that a step may take in one start
MORE = os.EX_TEMPFAIL  # the exit status of a step that has more to do
STARTS = 4  # after so many a step that never ends is given up
_LEAST = 30.0  # a step is not begun if less time is left
_TAIL = 4000  # characters of what a step printed last, kept in the state

DONE, FAILED, TIMED_OUT, CUT_OFF, SKIPPED = "done", "failed", "timed out", "cut off", "skipped"


@dataclass(frozen=True)
class Step:
    """A process; with `skipped`, why, it is not run. `environment` is added to this process's.

    With `shown`, the end of its output is also printed.
    """

    name: str
    command: tuple[str, ...]
    seconds: float = STEP_SECONDS
    skipped: str = ""
    shown: bool = False
    environment: dict[str, str] = field(default_factory=dict)


class Plan:
    """Steps, and the folder with their state and results."""

    def __init__(self, steps, folder):
        self.steps, self.folder = list(steps), Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = self.folder / "state.json"
        self.state = json.loads(self._file.read_text()) if self._file.is_file() else {}

    def start(self, seconds=float("inf"), again=()):
        """Run what is left, for at most so many seconds in all; return whether nothing is left.

        `again` names steps to run though they are done or failed; "failed" means all that failed.
        """
        deadline = time.monotonic() + seconds
        for step in self.steps:
            found = self.state.get(step.name, {})
            if step.name in again or (found.get("status") == FAILED and "failed" in again):
                self._note(step, {})
        for number, step in enumerate(self.steps, 1):
            goes_on = self._is_left(step)
            while goes_on and (left := deadline - time.monotonic()) >= min(_LEAST, step.seconds):
                print(f"[{number}/{len(self.steps)}] {step.name}", flush=True)
                goes_on = self._run(step, left) == MORE and self._is_left(step)
        print(self.table(), flush=True)
        return not any(map(self._is_left, self.steps))

    @property
    def succeeded(self):
        """Whether every step is done, or skipped."""
        return all(self._status(step) in (DONE, SKIPPED) for step in self.steps)

    def table(self):
        """Say how each step went, a line each."""
        lines = []
        for step in self.steps:
            found = self.state.get(step.name, {})
            status, reason = self._status(step), found.get("reason", "")
            took = f"{found['seconds']:6.0f} s" if "seconds" in found else " " * 8
            lines.append(f"{step.name:36s}{status:12s}{took}  {reason}".rstrip())
        return "\n".join(lines)

    def _status(self, step):
        return self.state.get(step.name, {}).get("status", "to do")

    def _is_left(self, step):
        """Whether a start would run it. "running" is one that was killed with its runner."""
        found = self.state.get(step.name, {})
        begun_again = found.get("starts", 0) < STARTS
        return self._status(step) in ("to do", CUT_OFF) or (
            self._status(step) in ("running", TIMED_OUT) and begun_again
        )

    def _run(self, step, left):
        """Run a step for at most so many seconds; return its exit status, if it ended."""
        found = self.state.get(step.name, {})
        if step.skipped:
            self._note(step, {"status": SKIPPED, "reason": step.skipped})
            return None
        limit, before = min(step.seconds, left), found.get("seconds", 0.0)
        starts = found.get("starts", 0) + 1
        self._note(step, {"status": "running", "starts": starts, "seconds": before})
        began = time.monotonic()
        code, printed = self._call(step, limit)
        result = {"starts": starts, "seconds": before + time.monotonic() - began}
        if code is None and limit < step.seconds:  # by this start's time, not by its own
            result |= {"status": CUT_OFF, "starts": starts - 1, "reason": "start again to go on"}
        elif code is None:
            result |= {"status": TIMED_OUT, "reason": f"stopped after {limit:.0f} s"}
        elif code == MORE:
            result |= {"status": TIMED_OUT, "reason": f"has more to do after {starts} starts"}
        elif code == 0:
            result |= {"status": DONE}
        else:
            ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            result |= {"status": FAILED, "reason": ended}
        self._note(step, result | {"printed": printed})
        if result["status"] != DONE and code != MORE:
            print(f"{printed}\n{step.name}: {result['status']}, {result['reason']}", flush=True)
        elif step.shown:
            print(printed, flush=True)
        return code

    def _call(self, step, limit):
        """Return the exit status, None if time ran out, and the end of what was printed."""
        log = self.folder / "log.txt"
        with log.open("ab") as file:
            file.write(f"\n=== {step.name}: {' '.join(step.command)}\n".encode())
            file.flush()
            begin = file.tell()
            process = subprocess.Popen(
                step.command,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | step.environment,
                process_group=0,  # so that it ends with all that it started
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        with log.open("rb") as file:
            file.seek(max(begin, log.stat().st_size - _TAIL))
            return code, file.read().decode(errors="replace").strip()

    def _note(self, step, found):
        self.state[step.name] = found
        written = self._file.with_suffix(".new")
        written.write_text(json.dumps(self.state, indent=1) + "\n")
        written.replace(self._file)  # at once: a start may be killed at any time


def _end(process):
    """End a process and what it started: ask, then kill."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(10)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()

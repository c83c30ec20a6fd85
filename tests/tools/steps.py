"""Run a plan in steps of limited time, so that the plan can be stopped and started again.

Each step is a process. A state file in a folder says how each step went; everything that the steps
print goes to one log. A start is one run of the plan, and it continues where the last start
stopped. It runs the steps that were not begun, were cut off or ran out of time, and it does not
repeat steps that are done or have failed. If a step fails, crashes or runs out of time, this is
reported, and the next step begins. A step that exits with `MORE` has written only some of its
results. It is begun again at once, and continues behind them.
"""

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

STEP_SECONDS = 540.0  # the most that a step may take in one start
MORE = os.EX_TEMPFAIL  # the exit status of a step that has more to do
STARTS = 4  # after this many starts, a step that does not end is given up
_LEAST = 30.0  # a step is not begun if less time is left
_TAIL = 4000  # characters at the end of a step's output that the state keeps

DONE, FAILED, TIMED_OUT, CUT_OFF, SKIPPED = "done", "failed", "timed out", "cut off", "skipped"


@dataclass(frozen=True)
class Step:
    """A process to run.

    Attributes:
        skipped: the reason for which the step is not run, or "".
        shown: whether the end of its output is also printed.
        environment: variables that are added to those of this process.
    """

    name: str
    command: tuple[str, ...]
    seconds: float = STEP_SECONDS
    skipped: str = ""
    shown: bool = False
    environment: dict[str, str] = field(default_factory=dict)


class Plan:
    """The steps, and the folder with their state and results."""

    def __init__(self, steps, folder):
        self.steps, self.folder = list(steps), Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = self.folder / "state.json"
        self.state = json.loads(self._file.read_text()) if self._file.is_file() else {}

    def start(self, seconds=float("inf"), again=()):
        """Run the steps that are left, for at most `seconds` in all; return whether no step is
        left.

        `again` names steps to run even if they are done or have failed; "failed" means all steps
        that have failed.
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
        """Whether every step is done or skipped."""
        return all(self._status(step) in (DONE, SKIPPED) for step in self.steps)

    def table(self):
        """Return a line for each step that says how it went."""
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
        """Whether a start would run the step.

        A step that is "running" was killed together with an earlier start.
        """
        found = self.state.get(step.name, {})
        begun_again = found.get("starts", 0) < STARTS
        return self._status(step) in ("to do", CUT_OFF) or (
            self._status(step) in ("running", TIMED_OUT) and begun_again
        )

    def _run(self, step, left):
        """Run a step for at most `left` seconds; return its exit status.

        The status is None if the step did not end.
        """
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
        if (
            code is None and limit < step.seconds
        ):  # the time of this start was up, not the time of the step
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
        """Return the exit status, or None if time ran out, and the end of what was printed."""
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
                process_group=0,  # so that its whole process group can be ended
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
        written.replace(self._file)  # atomic, since a start may be killed at any time


def _end(process):
    """End a process and the processes that it started: first ask them, then kill them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(10)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()

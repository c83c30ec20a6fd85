"""The example of training on ranks that die, on real processes."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections import defaultdict
from itertools import count

import pytest

from seqpar.comm.launch import store_of
from seqpar.comm.private_store import serve_private_store
from seqpar.elastic.launcher import Launcher, LauncherLimits
from seqpar.elastic.lighthouse import VARIABLE as LIGHTHOUSE
from seqpar.elastic.messages import VARIABLE
from tests.support.examples import EXAMPLES
from tests.support.lighthouses import lighthouse
from tests.support.processes import PROCESSES

pytestmark = pytest.mark.alone
ROUNDING = 1e-6  # of losses, relative: fp32, another number of ranks


def train(variables, folder, number, arguments):
    os.environ |= variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = ["elastic.py", "--folder", str(folder), *arguments]
    sys.stdout, sys.stderr = (open(f"{folder}/{x}-{number}", "w", 1) for x in ("out", "err"))  # noqa: SIM115 (until it ends)
    runpy.run_path(str(EXAMPLES / "elastic.py"), run_name="__main__")


class Process:
    """A process of the pool of forks, with the methods of a subprocess."""

    def __init__(self, *arguments):
        self._process = PROCESSES.Process(target=train, args=arguments, daemon=True)
        self._process.start()
        self.pid, self.kill = self._process.pid, self._process.kill

    def poll(self):
        return self._process.exitcode


def losses(folder, limits, *arguments):
    """Each step's losses, as all ranks printed them, and the seconds of each recovery."""
    folder.mkdir()
    store, keeper = serve_private_store()

    def start(number):
        return Process({VARIABLE: f"{number} {keeper}"}, folder, number, arguments)

    assert Launcher(store, start, limits).run() == 0
    return _printed(folder)


def losses_with_lighthouse(folder, ranks, *arguments):
    """The same as `losses` of processes that are started again, and that torchft groups."""
    folder.mkdir()
    store, (host, port) = store_of(None)
    numbers = count()

    def start(rank):
        where = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
        variables = where | {"LOCAL_RANK": str(rank), LIGHTHOUSE: address}
        return Process(variables, folder, next(numbers), arguments)

    with lighthouse(ranks) as address:
        processes = [start(rank) for rank in range(ranks)]
        while any(process.poll() != 0 for process in processes):
            for rank, process in enumerate(processes):
                if process.poll() == -signal.SIGKILL:
                    processes[rank] = start(rank)
                assert process.poll() in (None, 0, -signal.SIGKILL)
            time.sleep(0.05)
    del store
    return _printed(folder)


def _printed(folder):
    """Each step's losses, and the seconds of each recovery."""
    printed = "".join(path.read_text() for path in folder.glob("out-*"))
    logged = "".join(path.read_text() for path in folder.glob("err-*"))
    found = defaultdict(set)
    for step, loss in re.findall(r"step (\d+), loss (\S+)", printed):
        found[int(step)].add(float(loss))
    return found, [float(x) for x in re.findall(r"steps, (\S+) s later", logged)]


def check(found, expected, tolerance):
    assert set(found) == set(expected)
    for step, (loss,) in expected.items():
        assert all(abs(x / loss - 1) <= tolerance for x in found[step]), step


def test_a_survivor_continues_alone(tmp_path):
    """Rank 0 dies, and with it half of the last step."""
    arguments = "--steps", "3", "--timeout", "4"
    expected, _ = losses(tmp_path / "one", LauncherLimits(1), *arguments)
    found, recoveries = losses(tmp_path / "two", LauncherLimits(2), *arguments, "--kill", "1:0")
    check(found, expected, ROUNDING)
    assert len(recoveries) == 1 and len(list((tmp_path / "two").glob("killed-*"))) == 1


KILLS = [f"{2 * i + 1}:{rank}" for i, rank in enumerate([0, 1, 2, 0, 2, 1, 0, 0, 1, 2])]


@pytest.mark.exhaustive
def test_torchft_replaces_dead_ranks(tmp_path):
    """The lighthouse waits for the dead rank's successor, so losses have the same bits."""
    expected, _ = losses(tmp_path / "calm", LauncherLimits(2), "--steps", "7")
    kills = "--kill", "1:0", "3:1", "5:0"
    found, recoveries = losses_with_lighthouse(tmp_path / "kills", 2, "--steps", "7", *kills)
    assert len(list((tmp_path / "kills").glob("killed-*"))) == 3
    check(found, expected, 0.0)
    assert recoveries and max(recoveries) <= 10, recoveries


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("limits", "tolerance"),
    [
        (LauncherLimits(4, 2, 10, wait=60), 0.0),
        (LauncherLimits(4, 0, 10, wait=0, min_ranks=3), ROUNDING),
    ],
    ids=["replaced", "not replaced"],
)
def test_ten_kills_leave_the_losses_as_they_were(tmp_path, limits, tolerance):
    expected, _ = losses(tmp_path / "calm", LauncherLimits(4), "--steps", "21")
    found, recoveries = losses(tmp_path / "kills", limits, "--steps", "21", "--kill", *KILLS)
    assert len(list((tmp_path / "kills").glob("killed-*"))) == len(KILLS)
    check(found, expected, tolerance)
    assert recoveries and max(recoveries) <= 10, recoveries


LISTENING = """
import json
import os
from pathlib import Path
import torch
import seqpar.elastic

def ports(process):
    ends = {os.readlink(x) for x in Path(f"/proc/{process}/fd").iterdir() if x.is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in ends:
                yield fields[1].split(":")[0]

def build(group):
    return {"model": torch.nn.Linear(1, 1)}, lambda step: [*ports(os.getpid())]

for _, found in seqpar.elastic.steps(build, 1):
    text = json.dumps([found, [*ports(os.getppid())]])
    Path(__file__).with_name(f"listening-{os.getpid()}").write_text(text)
"""


def test_no_process_listens_where_other_hosts_reach_it(tmp_path):
    """The ranks listen on the loopback interface, and the launcher on no port at all."""
    script = tmp_path / "script.py"
    script.write_text(LISTENING)
    command = [sys.executable, "-m", "seqpar", "elastic", "--ranks", "2", str(script)]
    # Of other trainings on this machine, whose ranks are on several hosts.
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "network-of-hosts"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    found = [json.loads(file.read_text()) for file in tmp_path.glob("listening-*")]
    assert len(found) == 2
    for rank, launcher in found:
        assert set(rank) == {"0100007F"} and not launcher

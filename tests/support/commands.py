"""Run Python commands of tests as forks of the forkserver, which has already imported torch.

A new Python process needs 2 seconds of CPU time to import torch and seqpar; a fork needs none.
"""

import importlib
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import torch

from tests.support.faults import free_port
from tests.support.processes import PROCESSES

_start = subprocess.Popen
KNOWN = {"stdin", "stdout", "stderr", "text", "env", "cwd", "process_group"}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]


def fork_commands(monkeypatch):
    """Within a test, fork Python commands instead of starting them by `subprocess.Popen`.

    This holds in this process and in its forks. Tests of a new process, or of torchrun itself, must
    not use it.
    """
    monkeypatch.setattr(subprocess, "Popen", _fork_or_start)


def _fork_or_start(command, *arguments, **options):
    known = not arguments and set(options) <= KNOWN
    if known and command[0] == sys.executable and command[1] != "-c":
        return Forked(list(command[1:]), **options)
    return _start(command, *arguments, **options)


class Forked:
    """Replaces `subprocess.Popen` for a command that runs a Python module or script.

    If the command starts torchrun, the ranks are forked directly, without torchrun.
    """

    def __init__(
        self,
        words,
        stdin=None,
        stdout=None,
        stderr=None,
        text=False,
        env=None,
        cwd=None,
        process_group=None,
    ):
        environment, ranks = dict(os.environ if env is None else env), [{}]
        if words[:3] == TORCHRUN:
            name, _, count = words[3].partition("=")
            assert name == "--nproc-per-node", words
            words, ranks = words[4:], _environments(int(count))
        self.args, self.returncode = words, None
        self.stdout, out = _output(stdout, text)
        self.stderr, errors = (None, out) if stderr == subprocess.STDOUT else _output(stderr, text)
        place = cwd or os.getcwd(), os.getpid(), process_group
        self._processes = [
            PROCESSES.Process(target=_run, args=(words, environment | x, *place, out, errors))
            for x in ranks
        ]
        for process in self._processes:
            process.start()
        self.pid = self._processes[0].pid
        for connection in {out, errors} - {None}:
            connection.close()

    def poll(self):
        codes = [process.exitcode for process in self._processes]
        if None not in codes:
            self.returncode = next(filter(None, codes), 0)
        return self.returncode

    def wait(self, timeout=None):
        end = None if timeout is None else time.monotonic() + timeout
        for process in self._processes:
            process.join(None if end is None else max(0.0, end - time.monotonic()))
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for file in filter(None, (self.stdout, self.stderr)):
            file.close()
        self.wait()

    def communicate(self, _=None, timeout=None):
        """Wait for the end, and return the output, as `subprocess.Popen.communicate` does."""
        with ThreadPoolExecutor(2) as threads:
            reading = [x and threads.submit(x.read) for x in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            texts = [x and x.result() for x in reading]
        for file in filter(None, (self.stdout, self.stderr)):
            file.close()
        return texts

    def send_signal(self, number):
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)


def _environments(ranks):
    """Return the variables that torchrun sets for each rank."""
    shared = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "test",
        "OMP_NUM_THREADS": "1",
    }
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _output(kind, text):
    """Return the caller's end and the process's end of an output; None replaces an unused end."""
    if kind is None:
        return None, None
    if kind == subprocess.PIPE:
        read, write = os.pipe()
        return open(read, "r" if text else "rb"), Connection(write, readable=False)
    file = os.open(os.devnull, os.O_WRONLY) if kind == subprocess.DEVNULL else os.dup(kind.fileno())
    return None, Connection(file, readable=False)


def _run(words, environment, folder, parent, group, out, errors):
    if group is not None:
        os.setpgid(0, group)
    for number, connection in ((1, out), (2, errors)):
        if connection is not None:
            os.dup2(connection.fileno(), number)
    for connection in {out, errors} - {None}:
        connection.close()
    os.environ.clear()
    os.environ |= environment
    os.chdir(folder)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count())))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Processes that this process starts are forked from the same server.
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None
    os.getppid = lambda: parent
    subprocess.Popen = _fork_or_start
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.fspath(folder))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(words[0]))
        runpy.run_path(words[0], run_name="__main__")


class _AsSpawned:
    """Replaces the "spawn" context of multiprocessing in a benchmark, and forks."""

    Pipe = staticmethod(PROCESSES.Pipe)

    def __init__(self, changes):
        self._changes = changes

    def Process(self, target, args, daemon):
        before = os.getpid(), self._changes, target
        return PROCESSES.Process(target=_as_spawned, args=(*before, *args), daemon=daemon)


def _as_spawned(parent, changes, target, *arguments):
    os.getppid = lambda: parent
    for name, value in changes.items():
        module, _, constant = name.rpartition(".")
        setattr(importlib.import_module(module), constant, value)
    target(*arguments)


def fork_spawned(monkeypatch, module, changes=()):
    """Within a test, let a benchmark's module fork its ranks instead of spawning them.

    `changes` maps names of constants, with their modules, to the values that the ranks use. Tests
    of ranks that must end together with their parent must not use this.
    """
    found = types.SimpleNamespace(get_context=lambda _: _AsSpawned(dict(changes)))
    monkeypatch.setattr(module, "multiprocessing", found)

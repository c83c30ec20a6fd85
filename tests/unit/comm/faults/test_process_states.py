"""Whether a process lives, as its state server says: real processes, without torch."""

import io
import os
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest

from seqpar.comm.faults import process_state_server
from seqpar.comm.faults.process_state_server import ALIVE, GONE, MAX_SILENT_CONNECTIONS, STOPPED
from seqpar.comm.faults.process_states import (
    MAX_UNANSWERED,
    UNKNOWN,
    ProcessStates,
    ask_state_servers,
    start_state_server,
)

SECONDS = 20.0  # for what takes milliseconds on an idle machine
TOKEN = "0123456789abcdef"
# Starts a state server on a socket that it was given, and then holds the interpreter lock.
RANK = """
import ctypes, os, subprocess, sys
file, listener, token = sys.argv[1:]
child = subprocess.Popen([sys.executable, "-I", "-S", file, listener, str(os.getpid())],
                         pass_fds=[int(listener)], stdin=subprocess.PIPE)
child.stdin.write(token.encode())
child.stdin.close()
os.close(int(listener))
print(child.pid, flush=True)
ctypes.PyDLL(None).sleep(1000)
"""


@pytest.fixture
def rank():
    """A process whose interpreter is locked, and the process and address of its state server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        descriptor, port = listener.fileno(), listener.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, process_state_server.__file__, str(descriptor), TOKEN],
            pass_fds=[descriptor],
            stdout=subprocess.PIPE,
        )
    with process:
        yield process, int(process.stdout.readline()), f"127.0.0.1 {port} {TOKEN}"
        process.kill()


def answer(address):
    return ask_state_servers({0: address}, SECONDS)[0]


def runs(process):
    return process_state_server.state(process) != GONE


def eventually(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_locked_process_lives_until_stopped_or_killed(rank):
    process, _, address = rank
    assert answer(address) == ALIVE
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: answer(address) == STOPPED)
    process.send_signal(signal.SIGCONT)
    eventually(lambda: answer(address) == ALIVE)
    process.kill()
    eventually(lambda: answer(address) == GONE)


@pytest.mark.parametrize(
    ("letter", "word"),
    [("R", ALIVE), ("S", ALIVE), ("D", ALIVE), ("t", ALIVE), ("T", STOPPED), ("Z", GONE)],
)
def test_process_state_is_parsed_after_the_name(monkeypatch, letter, word):
    """`t` is one that a debugger or a profiler holds."""
    stat = io.BytesIO(f"1 (T) Z) {letter} 2 3".encode())
    monkeypatch.setattr(process_state_server, "open", lambda *_: stat, raising=False)
    assert process_state_server.state(1) == word


def test_a_state_server_ends_with_its_process(rank):
    process, child, _ = rank
    process.kill()
    eventually(lambda: not runs(child))


def test_a_state_server_of_a_stopped_process_continues(rank):
    process, child, address = rank
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5 * process_state_server.PARENT_POLL_SECONDS)
    assert runs(child) and answer(address) == STOPPED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_job_spares_state_servers(rank, number):
    _, child, address = rank
    assert answer(address) == ALIVE  # it has begun
    os.kill(child, number)
    assert answer(address) == ALIVE


def test_who_does_not_bring_the_token_learns_nothing(rank):
    host, port, token = rank[2].split()
    assert answer(f"{host} {port} {token[::-1]}") == UNKNOWN
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"?" * len(TOKEN))
        assert stranger.recv(100) == b""


def test_silent_strangers_do_not_silence_a_state_server(rank):
    host, port, _ = rank[2].split()
    strangers = [
        socket.create_connection((host, int(port))) for _ in range(MAX_SILENT_CONNECTIONS + 20)
    ]
    assert answer(rank[2]) == ALIVE
    for stranger in strangers:
        stranger.close()
    assert answer(rank[2]) == ALIVE


def test_a_stranger_on_the_port_is_not_believed():
    with socket.create_server(("127.0.0.1", 0)) as echo:
        address = f"127.0.0.1 {echo.getsockname()[1]} {TOKEN}"
        assert ask_state_servers({0: address}, 0.1) == {0: UNKNOWN}  # it says nothing
    assert answer(address) == GONE


def test_without_a_file_descriptor_nothing_is_known(rank):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        assert ask_state_servers({0: rank[2]}, SECONDS) == {0: UNKNOWN}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert answer(rank[2]) == ALIVE


def test_many_are_asked_at_once(rank):
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        silent = f"127.0.0.1 {nobody.getsockname()[1]} {TOKEN}"
        began = time.monotonic()
        answers = ask_state_servers({**dict.fromkeys(range(20), silent), 20: rank[2]}, 0.5)
    assert answers == {**dict.fromkeys(range(20), UNKNOWN), 20: ALIVE}
    assert time.monotonic() - began < 20 * 0.5


def children():
    """The state servers that are children of this process."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as stat, open(f"/proc/{name}/cmdline") as command:
                parent = int(stat.read().rpartition(")")[2].split()[1])
                if parent == os.getpid() and process_state_server.__file__ in command.read():
                    found.append(int(name))
        except OSError:
            pass
    return found


def test_one_state_server_per_process_without_inherited_files():
    read, write = os.pipe()
    os.set_inheritable(write, True)
    before, host = children(), "127.0.0.9"  # other tests of this process may use 127.0.0.1
    address = start_state_server(host)
    assert answer(address) == ALIVE and start_state_server(host) == address
    (child,) = set(children()) - set(before)
    files = {os.readlink(f"/proc/{child}/fd/{n}") for n in os.listdir(f"/proc/{child}/fd")}
    assert os.readlink(f"/proc/self/fd/{write}") not in files
    os.close(read)
    os.close(write)


@pytest.mark.parametrize(
    ("name", "value"),
    [("sys.frozen", True), ("sys.executable", ""), ("sys.executable", "/nowhere/python")],
)
def test_without_a_state_server_there_is_no_address(monkeypatch, name, value):
    monkeypatch.setattr(name, value, raising=False)
    assert start_state_server(f"127.0.0.{2 + len(str(value))}") == ""


def test_a_forked_child_is_not_its_parent(monkeypatch):
    address = start_state_server("127.0.0.1")
    monkeypatch.setattr("os.getpid", lambda: 1)
    assert start_state_server("127.0.0.1") != address


def test_an_unresponsive_state_server_counts_as_gone():
    answers = iter(
        [UNKNOWN] * (MAX_UNANSWERED - 1) + [ALIVE] + [UNKNOWN] * MAX_UNANSWERED + [STOPPED]
    )
    states = ProcessStates(1.0, lambda addresses, seconds: dict.fromkeys(addresses, next(answers)))
    heard = [states.of({3: "address"})[3] for _ in range(2 * MAX_UNANSWERED + 1)]
    unknown = [UNKNOWN] * (MAX_UNANSWERED - 1)
    assert heard == [*unknown, ALIVE, *unknown, GONE, STOPPED]
    assert states.of({}) == {}

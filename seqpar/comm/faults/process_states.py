"""Ask the operating system whether the process of a rank is alive.

Each process with a heartbeat starts a *state server* (`process_state_server.py`). A state server is
a small process that answers on a TCP port, even while a thread of the rank holds the interpreter
lock. Its address is the text "HOST PORT TOKEN".
"""

from __future__ import annotations

import functools
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress

# Unlike atexit's functions, it also runs at the end of a child process.
from multiprocessing.util import Finalize

from seqpar.comm.faults import process_state_server
from seqpar.comm.faults.process_state_server import ALIVE, GONE, STOPPED

UNKNOWN = "unknown"  # the state of a rank whose state server does not answer
MAX_UNANSWERED = 3  # after this number of unanswered questions in a row, a rank counts as gone

Ask = Callable[[Mapping[int, str], float], dict[int, str]]


class ProcessStates:
    def __init__(self, seconds: float, ask: Ask) -> None:
        """Keep `ask`, a function like `ask_state_servers`, and `seconds`, the longest time for
        which `ask` waits.
        """
        self._seconds, self._ask = seconds, ask
        # For each rank, how many questions in a row have had no answer.
        self._unanswered: dict[int, int] = {}

    def of(self, addresses: Mapping[int, str]) -> dict[int, str]:
        """Return ALIVE, STOPPED, GONE or UNKNOWN for each rank, given the addresses of state
        servers.

        The state server of a rank is a small process on the machine of the rank, which says whether
        the process of the rank is alive. A state server that does not answer may be slow, or its
        machine may be gone. A rank whose state server does not answer is UNKNOWN at first, and GONE
        after `MAX_UNANSWERED` questions.
        """
        answers = self._ask(addresses, self._seconds) if addresses else {}
        self._unanswered = {
            rank: self._unanswered.get(rank, 0) + 1
            for rank, answer in answers.items()
            if answer == UNKNOWN
        }
        gone = {rank: GONE for rank, n in self._unanswered.items() if n >= MAX_UNANSWERED}
        return {**answers, **gone}


def ask_state_servers(addresses: Mapping[int, str], seconds: float) -> dict[int, str]:
    """Ask all state servers at the same time. Return the state of each rank, or UNKNOWN if its
    state server does not answer within `seconds`.
    """
    answers = dict.fromkeys(addresses, UNKNOWN)
    end = time.monotonic() + seconds
    # The selector raises an OSError if this process cannot open more files.
    with suppress(OSError), selectors.DefaultSelector() as selector, ExitStack() as stack:
        for rank, address in addresses.items():
            host, port, token = address.split()
            connection = stack.enter_context(socket.socket(_family(host)))
            connection.setblocking(False)
            connection.connect_ex((host, int(port)))
            selector.register(connection, selectors.EVENT_WRITE, (rank, connection, token.encode()))
        while selector.get_map() and (ready := selector.select(max(0.0, end - time.monotonic()))):
            for key, event in ready:
                rank, connection, proof = key.data
                with suppress(OSError):  # no answer
                    try:
                        if event & selectors.EVENT_WRITE:
                            connection.send(proof)
                            selector.modify(connection, selectors.EVENT_READ, key.data)
                            continue
                        answer = connection.recv(64)
                    # The machine is alive, but no process listens on the port.
                    except ConnectionRefusedError:
                        answer = proof + GONE.encode()
                    for word in (ALIVE, STOPPED, GONE):
                        # Otherwise a different program listens on the port.
                        if answer == proof + word.encode():
                            answers[rank] = word
                selector.unregister(connection)
    return answers


def start_state_server(host: str) -> str:
    """Return the address of the state server of this process, which the first call starts.

    The state server is a small process that tells other ranks whether this process is alive. It
    listens at the network address `host` of this machine, and ends with this process. The result is
    "" if the state server cannot be started, for example outside Linux.
    """
    return _start_state_server(host, os.getpid())  # a forked child needs its own state server


@functools.cache
def _start_state_server(host: str, process: int) -> str:
    if not sys.executable or getattr(sys, "frozen", False):
        return ""
    token = os.urandom(16).hex()
    program = sys.executable, "-I", "-S", process_state_server.__file__
    try:
        # if /proc belongs to a different PID namespace
        if os.readlink("/proc/self") != str(process):
            return ""
        # The rank opens the socket itself, so it need not wait until the state server has started.
        with socket.create_server((host, 0), family=_family(host)) as listener:
            port, descriptor = listener.getsockname()[1], listener.fileno()
            # The state server inherits no other files, because these may be sockets that must close
            # when this process ends. It runs in a new session, so that a terminal does not
            # interrupt it.
            child = subprocess.Popen(
                [*program, str(descriptor), str(process)],
                pass_fds=[descriptor],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
    except OSError:
        return ""
    with suppress(BrokenPipeError), child.stdin as pipe:  # type: ignore[union-attr]
        pipe.write(token.encode())
    child.returncode = 0  # `_end` waits for the child, so `subprocess` need not wait for it at exit
    # With a negative priority, this runs after the finalizers of heartbeats.
    Finalize(None, _end, (child.pid,), exitpriority=-1)
    return f"{host} {port} {token}"


def _end(child: int) -> None:
    with suppress(ChildProcessError):
        if os.waitpid(child, os.WNOHANG) == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET

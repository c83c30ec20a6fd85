"""A program that reports whether a rank's process lives: `python -I -S process_state_server.py`.

A thread of the rank cannot report it while another thread holds Python's interpreter lock, as the
sort of a long list does. Each rank therefore starts this program (`process_states.py`). It asks the
operating system, and answers every connection that sends the token. It has few imports, so it is
small and starts quickly. It ends at most `PARENT_POLL_SECONDS` after the rank's process, whatever
ended that process.

A server thread in C++, such as torch's store, would not do. It cannot tell a stopped rank from a
slow one, a client of a stopped one waits forever, and anyone may write to it. A connection to the
rank shows deaths, but not stops.
"""

import os
import selectors
import signal
import socket
import sys
from contextlib import suppress

ALIVE, STOPPED, GONE = "alive", "stopped", "gone"
PARENT_POLL_SECONDS = 1.0
MAX_SILENT_CONNECTIONS = 64  # one more closes the oldest


def state(process: int) -> str:
    """Return whether a process is alive, is stopped by a signal, or is gone.

    A process that a debugger or a profiler holds is alive: it may be held many times a second.
    """
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            letter = file.read().rpartition(b")")[2].split()[0]
    except OSError:
        return GONE
    return {b"T": STOPPED, b"Z": GONE, b"X": GONE}.get(letter, ALIVE)


def serve(listener: socket.socket, parent: int, token: bytes) -> None:
    """Answer connections that send the token, until the parent is gone."""
    silent: list[socket.socket] = []  # oldest first
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    # A process that loses its parent gets another. A pipe would not end while forked children of
    # the rank hold it.
    while os.getppid() == parent:
        ready = [key.fileobj for key, _ in selector.select(PARENT_POLL_SECONDS)]
        ended = [connection for connection in silent if connection in ready]
        for connection in ended:
            with suppress(OSError):  # the other end has closed it
                if connection.recv(len(token)) == token:
                    answer = state(parent) if os.getppid() == parent else GONE
                    connection.send(token + answer.encode())
        if listener in ready:
            with suppress(OSError):
                connection, _ = listener.accept()
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ)
                silent.append(connection)
        for connection in ended or silent[:-MAX_SILENT_CONNECTIONS]:
            selector.unregister(connection)
            silent.remove(connection)
            connection.close()


if __name__ == "__main__":
    _, descriptor, parent = sys.argv
    # Launchers signal whole jobs, even if a rank still has time, for example to save its model.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    with socket.socket(fileno=int(descriptor)) as listener:
        listener.setblocking(False)
        serve(listener, int(parent), sys.stdin.buffer.read())

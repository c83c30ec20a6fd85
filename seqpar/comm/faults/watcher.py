"""Say whether a rank's process lives, from a process beside it: `python -I -S watcher.py`.

A thread of the rank cannot say so while another holds Python's interpreter lock, as a sort of a
long list does. So each rank starts this program (`liveness.py`). It asks the operating system, and
answers whoever connects and brings the token. It imports little, so that it is small and starts at
once, and it ends at most `PARENT_POLL_SECONDS` after the rank's process, however that ends.

A server thread in C++, such as torch's store, would not do: it cannot tell a stopped rank from a
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
MAX_SILENT_CONNECTIONS = 64  # beyond that number the oldest is closed


def state(process: int) -> str:
    """Return whether a process is alive, is stopped by a signal, or is gone.

    One that a debugger or a profiler holds is alive: it may be held many times a second.
    """
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            letter = file.read().rpartition(b")")[2].split()[0]
    except OSError:
        return GONE
    return {b"T": STOPPED, b"Z": GONE, b"X": GONE}.get(letter, ALIVE)


def serve(listener: socket.socket, parent: int, token: bytes) -> None:
    """Answer those who bring the token, until the parent is gone."""
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
                    said = state(parent) if os.getppid() == parent else GONE
                    connection.send(token + said.encode())
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
    # Launchers signal whole jobs, also when a rank has time left: to save its model, say.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    with socket.socket(fileno=int(descriptor)) as listener:
        listener.setblocking(False)
        serve(listener, int(parent), sys.stdin.buffer.read())

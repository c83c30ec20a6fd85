"""A program that reports whether a rank's process lives: `python -I -S process_state_server.py`.

A thread of the rank cannot report it while another thread holds Python's interpreter lock, as a
sort of a long list does. Each rank therefore starts this program (`process_states.py`). It asks the
operating system, and answers every connection that sends the token. It has few imports, so it is
small and starts quickly. It ends at most `PARENT_POLL_SECONDS` after the rank's process, whatever
ended that process.

Two simpler ways do not work. A server thread in C++, such as torch's store, cannot tell a stopped
rank from a slow rank; a client of a stopped rank waits forever; and anyone may write to the store.
A connection to the rank shows that the rank has died, but not that it is stopped.
"""

import os
import selectors
import signal
import socket
import sys
from contextlib import suppress

ALIVE, STOPPED, GONE = "alive", "stopped", "gone"
PARENT_POLL_SECONDS = 1.0
MAX_SILENT_CONNECTIONS = 64  # connections without a token; one more closes the oldest


def state(process: int) -> str:
    """Return whether a process is alive, is stopped by a signal, or is gone.

    A process that a debugger or a profiler has stopped counts as alive, since a profiler may stop
    it many times a second.
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
    # A process whose parent has ended gets another parent. A pipe from the rank would not do: it
    # stays open while forked children of the rank hold it.
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
    # Launchers send signals to all processes of a job, while a rank may still have time, for
    # example to save its model. This process must live as long as the rank.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    with socket.socket(fileno=int(descriptor)) as listener:
        listener.setblocking(False)
        serve(listener, int(parent), sys.stdin.buffer.read())

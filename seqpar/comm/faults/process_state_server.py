"""A program that tells whether the process of a rank is alive: `python -I -S
process_state_server.py`.

Each rank starts this program as a separate process (`process_states.py`). A thread of the rank
could not answer while a different thread holds Python's interpreter lock, for example while a long
list is sorted. The program asks the operating system for the state of the rank's process, and
answers every connection that sends the right token. The program ends at most `PARENT_POLL_SECONDS`
after the process of the rank.

Two simpler methods do not work. A thread in C++, such as the thread of torch's store, cannot
distinguish a stopped rank from a slow rank, and ranks that ask this thread would wait for a stopped
rank forever. An open connection to the rank shows when the rank dies, but not when a signal has
stopped the rank.
"""

import os
import selectors
import signal
import socket
import sys
from contextlib import suppress

ALIVE, STOPPED, GONE = "alive", "stopped", "gone"
PARENT_POLL_SECONDS = 1.0
# At most this number of open connections may have sent no token. If there are more, the oldest is
# closed.
MAX_SILENT_CONNECTIONS = 64


def state(process: int) -> str:
    """Return whether a process is alive, stopped by a signal, or gone.

    A process that a debugger or profiler has stopped counts as alive, because a profiler may stop a
    process many times per second.
    """
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            letter = file.read().rpartition(b")")[2].split()[0]
    except OSError:
        return GONE
    return {b"T": STOPPED, b"Z": GONE, b"X": GONE}.get(letter, ALIVE)


def serve(listener: socket.socket, parent: int, token: bytes) -> None:
    """Answer connections that send the token, until the parent process has ended."""
    silent: list[socket.socket] = []  # oldest first
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    # When the parent ends, this process gets a different parent. The end of a pipe from the rank
    # would not show this, because forked children of the rank keep the pipe open.
    while os.getppid() == parent:
        ready = [key.fileobj for key, _ in selector.select(PARENT_POLL_SECONDS)]
        ended = [connection for connection in silent if connection in ready]
        for connection in ended:
            with suppress(OSError):  # the peer has closed the connection
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
    # Launchers send signals to all processes of a job, while a rank may still be saving its model.
    # This process must live as long as the rank, so it blocks these signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    with socket.socket(fileno=int(descriptor)) as listener:
        listener.setblocking(False)
        serve(listener, int(parent), sys.stdin.buffer.read())

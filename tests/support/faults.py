"""New processes for tests in which ranks die, stop or hang."""

import contextlib
import itertools
import os
import socket
from datetime import timedelta

import torch.distributed as dist

from tests.support.processes import PROCESSES

TIMEOUT = 10.0  # seconds, the timeout of the groups
SILENCE = TIMEOUT / 4  # seconds without a sign of life after which a rank counts as dead
LIMIT = 90.0  # seconds for a test that needs a few on an idle machine


def connect(rank, ranks, address, timeout=TIMEOUT):
    """Make a process group.

    `address` is the port of a TCPStore on rank 0, or the path of a FileStore.
    """
    if isinstance(address, int):
        store = dist.TCPStore("127.0.0.1", address, ranks, rank == 0, timedelta(seconds=LIMIT))
    else:
        store = dist.FileStore(address, ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
    )


def launch(function, ranks, address, *arguments):
    """Start `function` on each rank; return the processes and their pipes."""
    processes, pipes = [], []
    for rank in range(ranks):
        ours, theirs = PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(
            target=function, args=(rank, ranks, address, theirs, *arguments), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    return processes, pipes


def answers(processes, pipes, ranks):
    """Return what each of `ranks` sends, by rank, and then end all processes."""
    try:
        for rank in ranks:
            assert pipes[rank].poll(LIMIT), f"rank {rank} hangs"
        return {rank: pipes[rank].recv() for rank in ranks}
    finally:
        for process in processes:
            process.kill()
            process.join()


_PORTS = itertools.count(os.getpid())


def free_port():
    """Return a port that neither another worker of this test run nor a program that binds port 0
    gets.

    Another test run begins with a different port, which depends on its process id.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = (
            10_000 + 1_000 * worker + next(_PORTS) % 1_000
        )  # the system assigns ports from 32,768 on
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port

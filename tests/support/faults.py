"""Processes of their own for tests in which ranks die, stop or stand still."""

import contextlib
import itertools
import os
import socket
from datetime import timedelta

import torch.distributed as dist

from tests.support.processes import PROCESSES

TIMEOUT = 10.0  # seconds, of the groups
SILENCE = TIMEOUT / 4  # that make a rank dead
LIMIT = 90.0  # for what takes a few seconds on an idle machine


def connect(rank, ranks, address, timeout=TIMEOUT):
    """`address`: the port of a TCPStore that rank 0 hosts, or a FileStore's path."""
    if isinstance(address, int):
        store = dist.TCPStore("127.0.0.1", address, ranks, rank == 0, timedelta(seconds=LIMIT))
    else:
        store = dist.FileStore(address, ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
    )


def launch(function, ranks, address, *arguments):
    """Start `function` on each rank; its processes and pipes."""
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
    """What `ranks` send, by rank; then all processes are ended."""
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
    """A port that no other worker of this run is given, nor a program that binds port 0.

    Other runs begin at other ports, by their process ids.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 10_000 + 1_000 * worker + next(_PORTS) % 1_000  # the system gives those from 32,768
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port

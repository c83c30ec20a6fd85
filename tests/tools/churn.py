"""Kill and restart attention servers at random while trainers use them.

Run it as `python -m tests.tools.churn`.

Servers are killed, told to end, or stopped and continued. Meanwhile, two trainers submit tasks,
each with its own pool, and a third pool decodes with caches. Every result must have the bits that
this process computes, and must arrive within its deadline. In the end, this process must have no
more descriptors and threads than in the beginning. Its memory may grow by 32 MiB after a tenth of
the kills. A seed always gives the same faults.
"""

import argparse
import gc
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from tests.support.faults import LIMIT
from tests.support.processes import PROCESSES
from tests.support.requests import random_request
from tests.support.server_caches import decode, drawn, prefilled, undisturbed
from tests.support.servers import ServerProcess, connect, expected, running

SERVERS = 3
FAULTS = ["SIGKILL", "SIGKILL", "SIGTERM", "SIGSTOP"]
GROWTH = 2**25  # bytes by which the trainers' process may grow after a tenth of the kills


def differences(found, expected):
    """Describe each tensor whose bits are not the expected ones."""
    return [
        f"tensor {i} of {len(expected)}, {tuple(y.shape)}: {(x != y).sum()} elements differ, "
        f"by up to {(x - y).abs().max()}"
        for i, (x, y) in enumerate(zip(found, expected, strict=True))
        if not torch.equal(x, y)
    ]


class Decoder:
    """Decodes with caches on servers until it is told to end, and notes wrong results."""

    def __init__(self, folder, addresses, transports):
        self.tensors = drawn()
        self.expected = undisturbed(folder, self.tensors)
        self.pool = connect(*addresses, transports=transports)
        self.tasks, self.wrong = 0, []
        self.ended = threading.Event()

    def run(self):
        while not self.ended.is_set():
            with prefilled(self.pool, self.tensors) as cache:
                found = decode(cache, self.tensors, lambda i: time.sleep(0.01))
            self.wrong += differences(found, self.expected)
            self.tasks += len(found)


class Trainer:
    """Submits tasks until it is told to end, and notes wrong results."""

    def __init__(self, addresses, seed, transports):
        self.pool = connect(*addresses, transports=transports)
        self.requests = [random_request(seed + i, 16 + i, 32 + i) for i in range(8)]
        self.tasks, self.wrong = 0, []
        self.ended = threading.Event()

    def run(self):
        while not self.ended.is_set():
            futures = [self.pool.submit(request) for request in self.requests]
            for request, future in zip(self.requests, futures, strict=True):
                self.wrong += differences(future.result(LIMIT), expected(request))
                self.tasks += 1


def churn(folder, kills, seed, transports=("grpc",), say=lambda text: None):
    """Count tasks and faults. Raise an AssertionError if a result is wrong or something leaks."""
    # gRPC keeps a thread and descriptors while any pool is open, so one pool stays open.
    with running(f"ipc://{folder}/first") as server, connect(server.address):
        before = usage()
        counts = disturb(folder, kills, seed, transports, say)
        after = usage()
    counted = f"descriptors and threads: {before} before, {after} after"
    assert after <= before, f"{counted}: {descriptors()}"
    return counts | {"descriptors and threads": after}


def disturb(folder, kills, seed, transports, say):
    """Kill servers `kills` times while trainers use them; return the counts."""
    random = np.random.default_rng(seed)
    servers = [ServerProcess(f"ipc://{folder}/{i}", transports=transports) for i in range(SERVERS)]
    addresses = [server.address for server in servers]
    trainers = [Trainer(addresses, seed + 100 * i, transports) for i in range(2)]
    trainers.append(Decoder(folder, addresses, transports))
    counts = {"kills": 0, "tasks": 0}
    sizes = []  # bytes of this process after each kill
    try:
        with ThreadPoolExecutor(len(trainers)) as threads:
            running = [threads.submit(trainer.run) for trainer in trainers]
            for kill in range(kills):
                i, fault = int(random.integers(SERVERS)), str(random.choice(FAULTS))
                say(f"{kill}: {fault} to server {i}, {sum(x.tasks for x in trainers)} tasks")
                servers[i].signal(fault)
                time.sleep(float(random.uniform(0.0, 0.3)))
                if fault == "SIGSTOP":
                    servers[i].signal("SIGCONT")
                else:
                    servers[i].process.join(LIMIT)
                    servers[i].end()
                    servers[i] = ServerProcess(addresses[i], transports=transports)
                    assert servers[i].address
                counts["kills"] += 1
                sizes.append(resident())
                assert not any(x.done() for x in running), [x.exception(0) for x in running]
                assert_right(trainers)
            for trainer in trainers:
                trainer.ended.set()
            for each in running:
                each.result(LIMIT)
    finally:
        for trainer in trainers:
            trainer.ended.set()
            trainer.pool.close()
        for server in servers:
            server.end()
    counts["tasks"] = sum(trainer.tasks for trainer in trainers)
    assert_right(trainers)
    early, late = sizes[kills // 10], sizes[-1]
    assert late < early + GROWTH, f"{early} bytes of memory after a tenth, {late} in the end"
    return counts | {"MiB after a tenth": early >> 20, "MiB in the end": late >> 20}


def assert_right(trainers):
    wrong = [f"{type(x).__name__}: {y}" for x in trainers for y in x.wrong]
    assert not wrong, f"{len(wrong)} results were wrong: {wrong[:10]}"


def resident():
    """Return the bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def usage():
    """Return how many descriptors and threads this process has.

    Things that are made once for the whole process are made before, so that they always count.
    """
    process = PROCESSES.Process(target=int)  # starts the server of processes
    process.start()
    process.join()
    process.close()
    expected(random_request(0))
    connect("ipc:///nonexistent/server", deadlines={"connect": 0.01}).close()
    gc.collect()
    return len(descriptors()), threading.active_count()


def descriptors():
    """Return the files on which this process's descriptors are open."""
    names = os.listdir("/proc/self/fd")  # the descriptor of the folder itself is closed now
    return [os.readlink(path) for x in names if os.path.lexists(path := f"/proc/self/fd/{x}")]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transports", nargs="+", default=["grpc"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # servers have 1; the last digits may depend on it
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        counts = churn(folder, arguments.kills, arguments.seed, arguments.transports, print)
        print(f"{counts} in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

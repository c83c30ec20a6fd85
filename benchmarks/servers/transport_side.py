"""One side of a comparison of transports: a server and a pool of the seqpar that is imported.

Run it as a program, with JSON: the server's address, and the folder of its keys or null. It reads
the kind and the number of calls from each line of its input, and prints the seconds of these calls.
This file uses nothing of the checkout that it is in.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from seqpar import ServerPool
from seqpar.layout.masks.mask import Slices
from seqpar.servers.server_check import payload
from seqpar.servers.wire.request import Request
from seqpar.softmax.compute.call_options import CallOptions

ROWS, HEADS, DIM = 128, 8, 64  # of the small task
LIMIT = 60.0  # seconds


def small_task() -> Request:
    """Return causal attention of one short document."""
    x = torch.randn(1, ROWS, HEADS, DIM, dtype=torch.bfloat16)
    rows, positions = np.array([[0, ROWS]]), np.arange(ROWS, dtype=np.int32)
    band, none = np.array([[-ROWS, 0]]), np.empty((0, 2), np.int64)
    slices = Slices(rows, rows, band, positions, positions, none)
    return Request(x, x, x, slices, CallOptions(DIM**-0.5, 0.0, "default", True))


def run(address: str, keys: str | None) -> None:
    torch.set_num_threads(1)
    seqpar = [sys.executable, "-P", "-m", "seqpar"]  # not that of the working directory
    if keys is not None:
        subprocess.run([*seqpar, "keygen", keys], check=True, stdout=subprocess.DEVNULL)
    secured = [] if keys is None else ["--keys", keys]
    command = [*seqpar, "serve", "--bind", address, "--threads", "1", *secured]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[2]  # after "serving at"
            folder = None if keys is None else Path(keys)
            with ServerPool.connect(address, keys=folder, home=False) as pool:
                requests = {"task": small_task(), "payload": payload(64)}
                print(json.dumps(pool.report().servers[0].transport), flush=True)
                for line in sys.stdin:
                    kind, times = json.loads(line)
                    seconds = []
                    for _ in range(times):
                        start = time.perf_counter()
                        pool.submit(requests[kind]).result(LIMIT)
                        seconds.append(time.perf_counter() - start)
                    print(json.dumps(seconds), flush=True)
        finally:
            server.kill()


if __name__ == "__main__":
    run(*json.loads(sys.argv[1]))

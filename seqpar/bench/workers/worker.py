"""One rank of a sweep as a process, started by `ranks.py`: `-m seqpar.bench.workers.worker`."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

import torch

from seqpar.bench.workers.rank import Rank
from seqpar.bench.workers.ranks import Task
from seqpar.comm.launch import connect, join

_PR_SET_PDEATHSIG = 1


def serve(host: str, port: int, name: str, rank: int, size: int, device: torch.device) -> None:
    store = connect(host, port)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    measuring = Rank(join(store, f"{name}/group", rank, size, device), device)
    store.set(f"{name}/ready/{rank}", "")
    number = 0
    while True:
        task = json.loads(store.get(f"{name}/task/{number}"))
        answer = answer_to(measuring, task)
        if "failed" in answer:
            store.set(f"{name}/failed/{number}", "")
        store.set(f"{name}/answer/{number}/{rank}", json.dumps(answer))
        number += 1


def answer_to(measuring: Rank, task: Task) -> dict[str, object]:
    """Return the value of a task, or why it failed and whether the rank can continue."""
    try:
        return {"value": measuring.answer(task)}
    except ValueError as error:
        return {"failed": f"refused: {error}", "refused": True}
    except torch.OutOfMemoryError as error:
        return {"failed": f"out of memory: {error}".splitlines()[0]}
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        out_of_memory = "allocate memory" in first  # the words of torch's CPU allocator
        prefix = "out of memory: " if out_of_memory else ""
        return {"failed": f"{prefix}{type(error).__name__}: {first[:500]}"}


def main() -> None:
    host, port, name, rank, size, device, parent = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver ends its ranks
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return  # the parent died before prctl
    serve(host, int(port), name, int(rank), int(size), torch.device(device))


if __name__ == "__main__":
    main()

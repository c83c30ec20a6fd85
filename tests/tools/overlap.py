"""Measure on one GPU how much of the messages' time is hidden behind computation.

`python -m tests.tools.overlap --folder FOLDER` computes all ranks of a strategy on one GPU, forward
and backward, and writes overlap.json after each strategy. Each rank is a thread with its own
stream. It copies its messages on a second stream, which has a high priority. The file has the
median seconds of three ways to call all ranks:

* streams: with these streams;
* in turn: on one stream, where the host waits for each copy;
* no messages: with these streams, but each message counts as received at once.

The command fails if the first two ways do not give the same bits. Without a GPU there are no
streams, and the first two ways are the same.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from contextlib import nullcontext

import torch

from benchmarks import RESULTS, harness
from benchmarks.kernels.device import DEVICE, GPU, refusal, usable
from seqpar import Layout
from seqpar.comm.messages.comm import Pending
from tests.support.cases import module
from tests.support.ranks import VirtualComm, virtual
from tests.support.steady import SilentComm

DTYPE = torch.bfloat16 if GPU else torch.float32
STRATEGIES = "ring", "all_gather", "ulysses", "token_ring"


class StreamComm(VirtualComm):
    """A virtual rank that copies its messages on a stream of high priority."""

    def __init__(self, name, rank, size, mail):
        super().__init__(name, rank, size, mail)
        self._stream = torch.cuda.Stream(priority=-1)

    def settle(self, tensor):
        return torch.cuda.current_stream().record_event()

    def start(self, sends, recvs, exchange):
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            pending = super().start(sends, recvs, exchange)
        return _StreamPending(pending, self._stream)


class _StreamPending(Pending):
    def __init__(self, pending, stream):
        super().__init__([], [])
        self._pending, self._stream = pending, stream

    def wait(self):
        with torch.cuda.stream(self._stream):
            self._pending.wait()
        torch.cuda.current_stream().wait_stream(self._stream)


def silent(_name, rank, size, _mail):
    return SilentComm(rank, size)


class Ranks:
    """The operands and the stream of each rank."""

    def __init__(self, strategy, options):
        self._strategy, ranks = strategy, options.ranks
        self._layout = Layout.zigzag(options.tokens * ranks, ranks)
        heads, kv_heads = options.heads
        made = {"device": DEVICE, "dtype": DTYPE}
        self._operands = [
            [
                torch.randn(self._layout.tokens_on(rank), n, options.dim, **made)
                for n in (heads, kv_heads, kv_heads, heads)
            ]
            for rank in range(ranks)
        ]
        self._streams = [torch.cuda.Stream() for _ in range(ranks)] if GPU else []

    def call(self, comm, has_stream):
        """Return out and the gradients of a rank."""
        stream = self._streams[comm.rank] if has_stream and GPU else None
        *operands, dout = self._operands[comm.rank]
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            inputs = [x.detach().requires_grad_() for x in operands]
            out = module(self._strategy, comm)(*inputs, self._layout, causal=True)
            return [out.detach(), *torch.autograd.grad(out, inputs, dout)]

    def timed(self, make_comm, has_stream):
        """Return the seconds of a call of all ranks, and their results."""
        wait()
        began = time.perf_counter()
        results = virtual(len(self._operands), self.call, has_stream, make_comm=make_comm)
        wait()
        return time.perf_counter() - began, results


def wait():
    if GPU:
        torch.cuda.synchronize()


def measure(strategy, options):
    """Return the median seconds of each way, and whether the results have the same bits."""
    ranks, seconds, results = Ranks(strategy, options), {}, {}
    ways = {
        "streams": (StreamComm if GPU else VirtualComm, True),
        "in turn": (VirtualComm, False),
        "no messages": (silent, True),
    }
    for way, (make_comm, has_stream) in ways.items():
        _, results[way] = ranks.timed(
            make_comm, has_stream
        )  # the first call compiles, and builds tables
        rounds = [ranks.timed(make_comm, has_stream)[0] for _ in range(options.rounds)]
        seconds[way] = statistics.median(rounds)
    tensors = (itertools.chain(*results[way]) for way in ("streams", "in turn"))
    same_bits = all(torch.equal(x, y) for x, y in zip(*tensors, strict=True))
    return {"seconds": seconds, "same_bits": same_bits}


ARGUMENTS = {
    "--folder": (RESULTS, "folder of the result file"),
    "--tokens": (8192, "of each rank"),
    "--ranks": 4,
    "--heads": ([32, 8], "query and KV heads"),
    "--dim": 128,
    "--rounds": 5,
}


def main():
    options = harness.arguments_of(__doc__, ARGUMENTS)
    sizes = {name: getattr(options, name) for name in ("tokens", "ranks", "heads", "dim")}
    results = {}
    for strategy in STRATEGIES:
        try:
            results[strategy] = measure(strategy, options)
        except Exception as error:
            results[strategy] = refusal(strategy, error)
        harness.write(options.folder, "overlap", {"sizes": sizes, "results": results})
        print(f"{strategy}: {results[strategy]}", flush=True)
        if not usable():
            return 1
    return int(not all(x.get("same_bits") for x in results.values()))


if __name__ == "__main__":
    sys.exit(main())

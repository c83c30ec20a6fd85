"""Compare the computation of all ranks of a strategy with one kernel over all tokens.

Ranks are virtual: they run one after another on one device and receive noise instead of messages.
The attention kernels of every step are timed by the device's clock. The efficiency is one device's
time for the whole sequence over the sum of the ranks' times; the loss comes from smaller tiles,
continued partials, and merging. Results are written after each workload, and the next start
continues there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import RESULTS, harness
from benchmarks.kernels.device import DEVICE, GPU, HEAD_START, START_AGAIN, refusal, usable
from seqpar import Layout, USPAttention, make_attention, use_backend
from seqpar.comm.messages.exchange import Comm, Pending
from seqpar.comm.messages.header import Message
from seqpar.core.hooks import Moment, TracedWork, hooks
from seqpar.softmax.call import Operands

STRATEGIES = ("ring", "all_gather", "token_ring", "ulysses", "usp")
LAYOUTS = ("zigzag", "contiguous", "striped")
BACKEND = "triton" if GPU else "aten"
PASSES = ("forward", "backward")


class Sizes(NamedTuple):
    """The size of the computation: total tokens, query and KV heads, head dim, and ranks."""

    tokens: int
    heads: int
    kv_heads: int
    dim: int
    ranks: int


class Alone(Comm):
    """One rank without its peers: it immediately receives noise."""

    names = itertools.count()

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(f"alone{next(self.names)}", rank, size)

    def start(self, sends: list[Message], recvs: list[Message], exchange: object) -> Pending:
        for _, x in recvs:
            if x.dtype == torch.uint8:
                x.random_(56, 64)  # the bytes of a small, finite number in any float dtype
            else:
                x.normal_()
        return Pending([], [])


class Clock:
    """A `Recorder` that sums the time of attention kernels."""

    def __init__(self) -> None:
        self._moments: list[tuple[Moment, Moment]] = []

    def begin(self, label: str, rank: int) -> None:
        """Ignore the beginning of a call."""

    def compute(self, start: Moment, stop: Moment, work: TracedWork) -> None:
        """Record a computation."""
        self._moments.append((start, stop))

    def exchange(self, *_: Any) -> Any:
        """Ignore an exchange. Returns a maker of contexts for its wait."""
        return nullcontext

    def seconds(self) -> float:
        """Return the sum after the device has finished."""
        if GPU:
            torch.cuda.synchronize()
        return sum(
            stop - start
            if isinstance(start, float) and isinstance(stop, float)
            else start.elapsed_time(stop) / 1e3  # type: ignore[union-attr,arg-type]
            for start, stop in self._moments
        )


class Rank:
    """One rank's operands and passes."""

    def __init__(self, strategy: str, layout: Layout, rank: int, sizes: Sizes) -> None:
        comm = Alone(rank, layout.ranks)
        if strategy == "usp":
            comm.shape = (2, layout.ranks // 2)
        self._attention: Any = (
            USPAttention(comm) if strategy == "usp" else make_attention(strategy, comm)
        )
        n = layout.token_indices(rank).numel()
        self._q, self._k, self._v, self._dout = (
            torch.randn(
                1, n, heads, sizes.dim, device=DEVICE, dtype=torch.bfloat16 if GPU else None
            )
            for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)
        )
        self._layout = layout

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of one call's kernels, forward and backward."""
        q, k, v = self._q, self._k, self._v
        strategy, comm = self._attention._bound.strategy, self._attention._bound.comm.call()
        call = self._attention._resolve(q, k, v, self._layout, causal=True)
        operands, out, lse, residuals = Operands(q, k, v), None, None, None

        def forward() -> None:
            nonlocal out, lse, residuals
            out, lse, residuals = strategy.forward(comm, call, operands)

        took = timed(forward)
        kept = residuals or [q, k, v, out, lse]
        return took, timed(lambda: strategy.backward(comm, call, self._dout, None, None, kept))


def timed(function: Callable[[], object]) -> float:
    """Return the seconds of the attention kernels in a call, without the host's time."""
    clock = Clock()
    if GPU:
        torch.cuda._sleep(10 * HEAD_START)
    with torch.no_grad(), hooks.set(trace=clock):
        function()
    return clock.seconds()


def median(rank: Callable[[], Rank], rounds: int) -> tuple[float, ...]:
    """Return the medians of a rank's passes, after one call to compile."""
    made = rank()
    made.seconds()
    return tuple(map(statistics.median, zip(*[made.seconds() for _ in range(rounds)], strict=True)))


def workloads(sizes: Sizes) -> Iterator[tuple[str, str, str, list[int]]]:
    """Yield names, strategies, layouts' kinds and cu_seqlens."""
    for documents, kind, strategy in itertools.product((1, 32), LAYOUTS, STRATEGIES):
        edges = [sizes.tokens * i // documents for i in range(documents + 1)]
        yield f"{strategy}, {kind}, {documents} documents", strategy, kind, edges


def measure(
    strategy: str, kind: str, edges: list[int], sizes: Sizes, rounds: int
) -> dict[str, Any]:
    """Return the seconds of one device and of each rank, by pass, and the efficiencies."""
    layout, whole = getattr(Layout, kind)(edges, sizes.ranks), Layout.contiguous(edges, 1)
    one = median(lambda: Rank("ring", whole, 0, sizes), rounds)
    ranks = [
        median(lambda rank=rank: Rank(strategy, layout, rank, sizes), rounds)  # type: ignore[misc]
        for rank in range(sizes.ranks)
    ]
    found: dict[str, Any] = {"one": one, "ranks": ranks}
    for i, direction in enumerate(PASSES):
        took = [rank[i] for rank in ranks]
        found[direction] = {
            "efficiency": one[i] / sum(took),
            "slowest": sizes.ranks * max(took) / sum(took),
        }
    return found


def table(results: list[dict[str, Any]]) -> None:
    """Print one line per workload."""
    print(f"{'efficiency (slowest rank ÷ mean)':44s}" + "".join(f"{x:>18s}" for x in PASSES))
    for result in results:
        cells = result.get("refused", "")[:60]
        if not cells:
            rates = (result[x] for x in PASSES)
            cells = "".join(f"{x['efficiency']:10.1%} ({x['slowest']:4.2f})" for x in rates)
        print(f"{result['workload']:44s}{cells}")


def main() -> int:
    """Measure the remaining workloads, and print all results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument(
        "--seconds", type=float, default=480, help="begin no workload after this time"
    )
    parser.add_argument("--tokens", type=int, default=65536 if GPU else 2048)
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), help="query and KV heads")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sizes = Sizes(options.tokens, *options.heads, options.dim, options.ranks)
    path, began = harness.results_file(options.folder, "efficiency"), time.monotonic()
    known = json.loads(path.read_text()) if path.is_file() else {}
    results = known["results"] if known.get("sizes") == sizes._asdict() else []
    done = {result["workload"] for result in results}
    left = [x for x in workloads(sizes) if x[0] not in done]
    for name, strategy, kind, edges in left:
        if time.monotonic() > began + options.seconds:
            return START_AGAIN
        print(name, flush=True)
        try:
            with use_backend(BACKEND):
                result = measure(strategy, kind, edges, sizes, options.rounds)
        except Exception as error:
            result = refusal(strategy, error)
        results.append({"workload": name} | result)
        harness.write(options.folder, "efficiency", {"sizes": sizes._asdict(), "results": results})
        if not usable():
            return START_AGAIN
    table(results)
    return int(any("refused" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())

"""Measure the host's time for one torch operator in a strategy's call, Python included."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count

import numpy as np
import torch

from seqpar.comm.messages.exchange import Comm
from seqpar.core.hooks import hooks
from seqpar.costs.cluster import Cluster
from seqpar.costs.profile.machine import one_thread
from seqpar.layout.layout import Layout
from seqpar.simulate.recording.program import Compute, Operators
from seqpar.simulate.recording.recording import record
from seqpar.strategies.registry import make_attention

_STRATEGIES = ("ulysses", "ring", "all_gather", "token_ring")
_RANKS = (2, 4, 8)
_TOKENS_PER_RANK = 16  # few, so that only the number of launches counts
_MAX_ROUNDS = 12
_MIN_ROUNDS = 4
_MAX_SECONDS = 10.0  # for all strategies together; afterwards each has only _MIN_ROUNDS
_MIN_LAUNCH_SECONDS = 1e-9  # on a busy machine the fitted time may be negative
_names = count()


def operator_seconds() -> float:
    """Return the seconds of a core for one torch operator in a call, regardless of its size.

    It is the slope of seconds over recorded operators, of strategies on tiny tensors, without
    messages or attention, on several numbers of ranks. It includes views and the Python between
    operators. No other thread may compute attention meanwhile. That takes about a second, at most
    about ten.
    """
    end = time.monotonic() + _MAX_SECONDS
    calls = [_call(name, ranks, end) for name in _STRATEGIES for ranks in _RANKS]
    operators, seconds = np.array(calls, float).T
    slope, _ = np.polyfit(operators, seconds, 1)
    return max(_MIN_LAUNCH_SECONDS, float(slope))


def with_host(cluster: Cluster) -> Cluster:
    """Return a cluster of cores with this machine's operator overhead; other clusters unchanged."""
    if cluster.overlaps:  # the host launches operators ahead of the device
        return cluster
    return replace(cluster, device=replace(cluster.device, operator=operator_seconds()))


def _call(strategy: str, ranks: int, end: float) -> tuple[int, float]:
    """Return a call's operators on the last rank, and its core's seconds by the time `end`."""
    layout = Layout.zigzag(_TOKENS_PER_RANK * ranks, ranks)

    def step(comm: Comm, device: str = "meta") -> None:
        attn = make_attention(strategy, comm)
        q, k, v = torch.zeros(
            3, _TOKENS_PER_RANK, ranks, 8, device=device, requires_grad=True
        ).unbind()
        out = attn(q, k, v, layout, causal=True)
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))

    (program,) = record(step, ranks, only=[ranks - 1], ordered=False)
    works = [x.work for x in program.each() if isinstance(x, Compute)]
    operators = sum(x.calls for x in works if isinstance(x, Operators))
    comm = Comm(f"alone{next(_names)}", ranks - 1, ranks)
    times = []
    with one_thread(), hooks.set(skip_messages=True, replace_compute=lambda area: None):
        for done in range(_MAX_ROUNDS):
            if done >= _MIN_ROUNDS and time.monotonic() > end:
                break
            start = time.thread_time()
            step(comm, "cpu")
            times.append(time.thread_time() - start)
    return operators, float(np.median(times[2:]))

"""Describe the machine of a group's ranks, with the host's time for each torch operator."""

from __future__ import annotations

import json
import logging
import socket
import time
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import torch

from seqpar.comm.messages.comm import Comm
from seqpar.comm.waiting import bounded, while_others_wait
from seqpar.core.hooks import set_hooks
from seqpar.costs.cluster import Cluster
from seqpar.costs.profile import machine
from seqpar.layout.layout import Layout
from seqpar.simulate.recording.program import Compute, Operators
from seqpar.simulate.recording.recording import ProgramRecorder, RecordingComm, recorded
from seqpar.strategies.registry import make_attention

MEASURE_SECONDS = 60.0  # the default limit for rank 0 to measure its machine
_ACTIVITY = "rank 0 measures this machine"
_MEASURING_SHARE = 0.8  # no round begins after this fraction of the limit
_MIN_SECONDS = 2.0  # suffices to read a profile from the cache
_STRATEGIES = ("ulysses", "ring", "all_gather", "token_ring")
_RANKS = (2, 4, 8)
_TOKENS_PER_RANK = 16  # few tokens, so that the time depends only on the number of operators
_MAX_ROUNDS = 12
_MIN_ROUNDS = 4
_MAX_SECONDS = 10.0  # after this time, the remaining strategies have only _MIN_ROUNDS each
_MIN_LAUNCH_SECONDS = 1e-9  # on a busy machine, the fitted time can be negative
_names = count()
_log = logging.getLogger("seqpar")


def cluster_of_rank_0(comm: Comm, seconds: float = MEASURE_SECONDS) -> Cluster:
    """Return rank 0's `Cluster.here()` on all ranks, or raise rank 0's error on all ranks.

    If rank 0 takes longer than `seconds`, it logs a warning and uses `Cluster.assumed()`.
    Meanwhile, the other ranks wait for rank 0.
    """
    hosts = sorted({*comm.all_gather_text(socket.gethostname(), label="hosts")})
    if len(hosts) > 1:
        raise ValueError(f"cluster must be given where ranks are on several hosts: {hosts}")

    def describe() -> dict[str, str]:
        try:
            cluster = replace(_here(seconds), measured=None)
        except Exception as fault:  # every error must reach the waiting ranks
            return {"cluster": "", "fault": f"{type(fault).__name__}: {fault}"}
        return {"cluster": cluster.to_json(), "fault": ""}

    own = while_others_wait(comm, describe, _ACTIVITY, max(seconds, _MIN_SECONDS))
    texts = comm.all_gather_text(json.dumps(own), label="cluster")
    description = json.loads(texts[0])
    if description["fault"]:
        raise ValueError(
            "cluster must be given, since rank 0 cannot describe its machine: "
            f"{description['fault']}"
        )
    return Cluster.from_text(description["cluster"])


def _here(seconds: float) -> Cluster:
    limit = max(seconds, _MIN_SECONDS)

    def measured() -> Cluster:
        with machine.within(_MEASURING_SHARE * seconds):
            return Cluster.here()

    try:
        return with_host(bounded(measured, _ACTIVITY, limit))
    except TimeoutError:
        remedy = "call seqpar.balance.Cluster.here() once in an earlier program, to keep them"
        message = "rank 0 has not measured this machine after %.0f s, so its speeds are assumed; %s"
        _log.warning(message, limit, remedy)
        return Cluster.assumed()


def operator_seconds() -> float:
    """Return the seconds that a core needs for one torch operator, whatever its size.

    Strategies run on tiny tensors, for several numbers of ranks, without messages and attention.
    Each call gives a number of operators and a number of seconds. A line is fitted to these points,
    and the result is the slope of the line. The result includes the time of views and of Python
    code between operators. Measuring takes about one second, and at most about ten seconds.
    """
    end = time.monotonic() + _MAX_SECONDS
    calls = [_call(name, ranks, end) for name in _STRATEGIES for ranks in _RANKS]
    operators, seconds = np.array(calls, float).T
    slope, _ = np.polyfit(operators, seconds, 1)
    return max(_MIN_LAUNCH_SECONDS, float(slope))


def with_host(cluster: Cluster) -> Cluster:
    """Return a cluster of cores with the time per torch operator that was measured on this machine.
    A cluster of GPUs is returned unchanged.
    """
    if cluster.overlaps:  # the host launches operators ahead of the device
        return cluster
    return replace(cluster, device=replace(cluster.device, operator=operator_seconds()))


def _call(strategy: str, ranks: int, end: float) -> tuple[int, float]:
    layout = Layout.zigzag(_TOKENS_PER_RANK * ranks, ranks)

    def step(comm: Comm, device: str = "meta") -> None:
        attn = make_attention(strategy, comm)
        q, k, v = torch.zeros(
            3, _TOKENS_PER_RANK, ranks, 8, device=device, requires_grad=True
        ).unbind()
        out = attn(q, k, v, layout, causal=True)
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))

    # The measured step does not run the code of kernels either.
    recorder = ProgramRecorder(ordered=False, counts=True, in_kernels=False)
    recording = RecordingComm(recorder, ranks - 1, ranks, False)
    recording.shape = (ranks,)
    program = recorded(partial(step, recording), recorder)
    works = [x.work for x in program.each() if isinstance(x, Compute)]
    operators = sum(x.calls for x in works if isinstance(x, Operators))
    comm = Comm(f"alone{next(_names)}", ranks - 1, ranks)
    times = []
    with machine.one_thread(), set_hooks(skip_messages=True, replace_compute=lambda area: None):
        for done in range(_MAX_ROUNDS):
            if done >= _MIN_ROUNDS and time.monotonic() > end:
                break
            start = time.thread_time()
            step(comm, "cpu")
            times.append(time.thread_time() - start)
    return operators, float(np.median(times[2:]))

"""Measure candidates with similar predictions on the ranks of a group."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from seqpar.attention.module import is_meta
from seqpar.auto.choosing import CandidatePrediction, Choice
from seqpar.comm.messages.comm import Comm
from seqpar.core.hooks import hooks, set_hooks
from seqpar.simulate.candidates import Candidate
from seqpar.simulate.playback.outcome import AS_FAST, slower_by
from seqpar.softmax.module import Attention

MIN_ROUNDS, MAX_ROUNDS = 5, 20  # in addition to one round that is not counted
ROUND_QUANTILE = 0.25  # of the rounds' times; other processes can disturb the slower rounds
MAX_ROUNDS_SECONDS = 1.0  # MIN_ROUNDS are measured even if they take longer
# A candidate is *close* to the fastest candidate if its predicted time is longer by at most this
# many standard deviations of a prediction's error. This is two standard deviations of the ratio of
# two predictions.
MAX_RELATIVE_ERRORS = 2 * 2**0.5


def can_be_measured(q: Tensor) -> bool:
    """Return whether a call can be measured now. The result is the same on all ranks."""
    replaced = hooks().skip_messages or hooks().replace_compute is not None
    return not (is_meta(q) or replaced or (q.is_cuda and torch.cuda.is_current_stream_capturing()))


def leaves_of(tensors: Sequence[Tensor], backward: bool) -> tuple[Tensor, ...]:
    """Return a call's tensors as leaves of a new graph. They require gradients if `backward` is
    True.
    """
    normal = not torch.is_inference_mode_enabled()
    # Tensors that were created in inference mode cannot require gradients outside of it.
    detached = (x.clone() if normal and x.is_inference() else x.detach() for x in tensors)
    return tuple(x.requires_grad_(backward) for x in detached)


def close(choice: Choice, error: float) -> list[Candidate]:
    """Return the candidates to measure, in the order of their predicted times.

    A candidate is measured if its predicted time is close to the fastest prediction. A further
    candidate is measured if measuring this candidate and all faster candidates takes little time.
    """
    max_seconds = choice.seconds * (1 + MAX_RELATIVE_ERRORS * error)
    measuring_seconds = 0.0
    candidates = []
    for x in choice.ranked:
        measuring_seconds += (1 + MIN_ROUNDS) * x.seconds
        if x.seconds <= max_seconds or measuring_seconds <= MAX_ROUNDS_SECONDS:
            candidates.append(x.candidate)
    return candidates


def measured(
    choice: Choice,
    error: float,
    module: Callable[[Candidate], Attention],
    call: Callable[[Attention], Tensor],
    operands: tuple[Tensor, ...],
    comm: Comm,
    backward: bool,
) -> Choice:
    """Measure the candidates whose predictions are close to the fastest prediction, on all ranks.
    Return a choice that is sorted by the measured times.

    All ranks call this function together. `module` returns the module of a candidate, and `call`
    calls this module. Each round runs every candidate once. The time of a round is that of the
    slowest rank, and the time of a candidate is the lower quartile over all rounds. Ranks exchange
    their times, so all ranks make the same choice. `error` is the standard deviation of the
    relative error of a prediction.
    """
    candidates = close(choice, error)
    if len(candidates) < 2:
        return choice

    def seconds_of(candidate: Candidate, synchronize_ranks: bool) -> float:
        attn = module(candidate)
        if synchronize_ranks:
            comm.all_gather(torch.zeros(1, device=comm.device), label="start")
        comm.synchronize()
        start = time.perf_counter()
        out = call(attn)
        if backward:
            torch.autograd.grad(out, operands, out.detach())
        comm.synchronize()
        return time.perf_counter() - start

    def run(rounds: int, synchronize_ranks: bool) -> Tensor:
        """Run each candidate once in each round, and return (rounds, candidates): the seconds of
        the slowest rank.
        """
        times = [[0.0] * len(candidates) for _ in range(rounds)]
        for first, seconds in enumerate(times):
            # The order is rotated in each round, because the time of a call depends on the call
            # before it.
            for turn in range(len(candidates)):
                i = (first + turn) % len(candidates)
                seconds[i] = seconds_of(candidates[i], synchronize_ranks)
        own = torch.tensor(times, dtype=torch.float64, device=comm.device)
        return torch.stack(comm.all_gather(own, label="seconds")).amax(0)

    with set_hooks(traces=()):
        # The first round runs without a barrier, so that the first messages are those by which
        # modules compare the calls of all ranks.
        once = float(run(1, False).sum())
        rounds = max(MIN_ROUNDS, int(MAX_ROUNDS_SECONDS / once))
        slowest = run(min(MAX_ROUNDS, rounds), True)
    seconds = dict(zip(candidates, slowest.quantile(ROUND_QUANTILE, 0).tolist(), strict=True))
    return _ranked(choice, seconds)


def _ranked(choice: Choice, seconds: dict[Candidate, float]) -> Choice:
    predictions = [x._replace(measured=seconds.get(x.candidate)) for x in choice.ranked]
    measured = [x for x in predictions if x.measured is not None]
    measured.sort(key=lambda x: x.measured or 0.0)  # a stable sort
    unmeasured = [x for x in predictions if x.measured is None]
    best = measured[0].measured or 0.0
    return replace(choice, ranked=(*(_compared(x, best) for x in measured), *unmeasured))


def _compared(x: CandidatePrediction, best: float) -> CandidatePrediction:
    assert x.measured is not None
    if x.measured == best:
        return x._replace(why_not="")
    slower = slower_by(x.measured, best)
    return x._replace(why_not=slower if slower == AS_FAST else f"{slower}, as measured")

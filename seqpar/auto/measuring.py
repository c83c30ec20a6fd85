"""Measure candidates whose predictions are too close to tell apart, with a group's live ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seqpar.attention.module import is_meta
from seqpar.auto.choosing import CandidatePrediction, Choice
from seqpar.comm.messages.exchange import Comm
from seqpar.core.hooks import hooks
from seqpar.simulate.candidates import Candidate
from seqpar.simulate.playback.outcome import AS_FAST, slower_by
from seqpar.softmax.module import Attention

MIN_ROUNDS, MAX_ROUNDS = 5, 20  # after one round that is not counted
ROUND_QUANTILE = 0.25  # of a candidate's rounds: slower ones were disturbed by other processes
MAX_ROUNDS_SECONDS = 1.0  # for a candidate's rounds, unless the minimum number takes longer
# Two standard deviations of the ratio of two predictions: a candidate is measured unless it is
# predicted to be behind by more of one prediction's errors.
MAX_RELATIVE_ERRORS = 2 * 2**0.5


def can_be_measured(q: Tensor) -> bool:
    """Return whether a call takes what it always takes: on all ranks or on none.

    A call without data does not, nor one whose messages or computes hooks replace, nor one that a
    CUDA graph captures, which waits for nothing.
    """
    replaced = hooks.skip_messages or hooks.replace_compute is not None
    return not (is_meta(q) or replaced or (q.is_cuda and torch.cuda.is_current_stream_capturing()))


def leaves_of(tensors: Sequence[Tensor], backward: bool) -> tuple[Tensor, ...]:
    """Return a call's tensors as leaves of a graph of their own, with `backward` differentiable."""
    normal = not torch.is_inference_mode_enabled()
    # outside of inference mode no gradient may be asked of tensors that were made in it
    detached = (x.clone() if normal and x.is_inference() else x.detach() for x in tensors)
    return tuple(x.requires_grad_(backward) for x in detached)


def close(choice: Choice, error: float) -> list[Candidate]:
    """Return the candidates to measure, those that are predicted to be the fastest first.

    They are those within the predictions' error of the first, and as many more as can be measured
    in `MAX_ROUNDS_SECONDS`: the shorter a call, the less predictions know of it.
    """
    most, taken, found = choice.seconds * (1 + MAX_RELATIVE_ERRORS * error), 0.0, []
    for x in choice.ranked:
        taken += (1 + MIN_ROUNDS) * x.seconds
        if x.seconds <= most or taken <= MAX_ROUNDS_SECONDS:
            found.append(x.candidate)
    return found


def measured(
    choice: Choice,
    error: float,
    module: Callable[[Candidate], Attention],
    call: Callable[[Attention], Any],
    operands: tuple[Tensor, ...],
    comm: Comm,
    backward: bool,
) -> Choice:
    """Return a choice with the close candidates ranked by what the call takes on the live ranks.

    All ranks make it together. They take turns with the candidates, round after round, and tell
    each other their seconds: a candidate takes as long as its slowest rank, in the lower quartile.
    So all have the same choice. Short calls have more rounds. With one close candidate nothing is
    done.

    Args:
        choice: by prediction, the same on all ranks.
        error: of predictions, one standard deviation, as a fraction.
        module: returns a candidate's module.
        call: makes the call through a module.
        operands: those of the call that it is differentiated by; none without `backward`.
        comm: the ranks.
        backward: whether gradients are computed, too.
    """
    found = close(choice, error)
    if len(found) < 2:
        return choice

    def turns(rounds: int, together: bool) -> Tensor:
        """Return (rounds, candidates) seconds of the slowest rank.

        Each round begins with another candidate: what a call takes depends on that before it.
        """
        times = [[0.0] * len(found) for _ in range(rounds)]
        for first, taken in enumerate(times):
            for turn in range(len(found)):
                i = (first + turn) % len(found)
                taken[i] = _seconds(module(found[i]), call, operands, comm, backward, together)
        own = torch.tensor(times, dtype=torch.float64, device=comm.device)
        return torch.stack(comm.all_gather(own, label="seconds")).amax(0)

    with hooks.set(trace=None):
        # the first round begins without a message, so that modules compare their calls first
        once = float(turns(1, False).sum())
        rounds = max(MIN_ROUNDS, int(MAX_ROUNDS_SECONDS / once))
        slowest = turns(min(MAX_ROUNDS, rounds), True)
    seconds = dict(zip(found, slowest.quantile(ROUND_QUANTILE, 0).tolist(), strict=True))
    return _ranked(choice, seconds)


def _seconds(
    attn: Attention,
    call: Callable[[Attention], Any],
    operands: tuple[Tensor, ...],
    comm: Comm,
    backward: bool,
    together: bool,
) -> float:
    """Return this rank's seconds of a call, forward and backward."""
    if together:
        comm.all_gather(torch.zeros(1, device=comm.device), label="start")
    comm.synchronize()
    start = time.perf_counter()
    out = call(attn)
    if backward:
        torch.autograd.grad(out, operands, out.detach())
    comm.synchronize()
    return time.perf_counter() - start


def _ranked(choice: Choice, seconds: dict[Candidate, float]) -> Choice:
    """Return a choice in which what was measured comes first, the fastest first."""
    both = [x._replace(measured=seconds.get(x.candidate)) for x in choice.ranked]
    taken = [x for x in both if x.measured is not None]
    taken.sort(key=lambda x: x.measured or 0.0)  # what is as fast stays in order
    rest = [x for x in both if x.measured is None]
    best = taken[0].measured or 0.0
    return replace(choice, ranked=(*(_compared(x, best) for x in taken), *rest))


def _compared(x: CandidatePrediction, best: float) -> CandidatePrediction:
    """Return a prediction that says by how much it was behind the best."""
    assert x.measured is not None
    if x.measured == best:
        return x._replace(why_not="")
    slower = slower_by(x.measured, best)
    return x._replace(why_not=slower if slower == AS_FAST else f"{slower}, as measured")

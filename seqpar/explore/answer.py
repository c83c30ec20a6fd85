"""Answer: what a strategy's own code does for a question, and when, on the cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from seqpar.attention.backend import use_backend
from seqpar.comm.messages.exchange import Comm
from seqpar.core.arguments import Ints
from seqpar.explore.question import Question
from seqpar.layout.layout import Layout
from seqpar.simulate.playback.outcome import Outcome
from seqpar.simulate.playback.playing import play
from seqpar.simulate.recording.program import Compute, Post, Program
from seqpar.simulate.recording.recording import record


@dataclass(frozen=True)
class Answer:
    """What comes of a question.

    Attributes:
        question: what was asked.
        layout: which rank holds which tokens.
        work: (ranks, steps) the (query, key) pairs, times heads, that each rank computes forward.
        bytes: (ranks, ranks) what each rank sends to each, forward and backward.
        outcome: when each rank computes, sends and waits, forward and backward.
    """

    question: Question
    layout: Layout
    work: Ints
    bytes: Ints
    outcome: Outcome


def answer(question: Question, check: Callable[[], None] = lambda: None) -> Answer:
    """Return what a question's call does. Nothing is computed or sent.

    `check` is called before each rank, and before the ranks' programs are played. An answer that
    nobody waits for ends with what it raises.

    Raises:
        ValueError: what the call raises, where the strategy cannot compute it.
    """
    layout, cluster = question.laid_out(), question.on()
    candidate, call = question.candidate(), question.call()

    def operands(rank: int) -> list[Tensor]:
        shape = layout.tokens_on(rank), question.head_dim
        return [
            torch.empty(
                shape[0], heads, shape[1], device="meta", dtype=question.torch_dtype()
            ).requires_grad_()
            for heads in (question.heads, question.kv_heads, question.kv_heads)
        ]

    def code(comm: Comm) -> None:
        check()
        out = candidate.make(comm)(*operands(comm.rank), layout, **call)
        out.backward(torch.empty_like(out))

    # the ranks' backend may not take tensors without data, and it changes no price
    with torch.enable_grad(), use_backend("aten"):
        programs = record(code, question.ranks, ordered=cluster.overlaps)
    check()
    return Answer(question, layout, work_of(programs), sent(programs), play(programs, cluster))


def sent(programs: list[Program]) -> Ints:
    """Return (ranks, ranks): the bytes that each rank sends to each."""
    found = np.zeros((len(programs), len(programs)), dtype=np.int64)
    for rank, program in enumerate(programs):
        for action in program.each():
            for peer, nbytes in action.sends if isinstance(action, Post) else ():
                found[rank, peer] += nbytes
    return found


def work_of(programs: list[Program]) -> Ints:
    """Return (ranks, steps): the area of each of a rank's computes in forward."""
    rows = [
        [x.area for x in program.each() if isinstance(x, Compute) and x.what.endswith("forward")]
        for program in programs
    ]
    steps = max(map(len, rows))
    return np.array([row + [0] * (steps - len(row)) for row in rows], dtype=np.int64)

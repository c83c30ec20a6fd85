"""Answer: simulate a strategy's own code for a question."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from seqpar.attention.operands import OperandShape
from seqpar.auto.choosing import recorded
from seqpar.core.arguments import Ints
from seqpar.explore.question import Question
from seqpar.layout.layout import Layout
from seqpar.simulate.playback.outcome import Outcome
from seqpar.simulate.playback.playing import play
from seqpar.simulate.recording.program import Compute, Post, Program


@dataclass(frozen=True)
class Answer:
    """The result of a question."""

    question: Question  # the question
    layout: Layout  # which rank holds which tokens
    work: Ints  # (ranks, steps) (query, key) pairs, times heads, that each rank computes in forward
    bytes: Ints  # (ranks, ranks) bytes from each rank to each, forward and backward
    outcome: Outcome  # when each rank computes, sends and waits, forward and backward


def answer(question: Question, check: Callable[[], None] = lambda: None) -> Answer:
    """Return the result of a question's call. No numbers are computed and no data is sent.

    `check` is called before each rank and before the programs are played, and may raise to stop.
    Raises a ValueError if the strategy cannot compute the call.
    """
    layout, cluster = question.laid_out(), question.on()
    sizes = 1, question.heads, question.kv_heads, question.head_dim, question.head_dim
    shape = OperandShape(question.torch_dtype(), *sizes)
    candidate, call = question.candidate(), question.call()
    programs = recorded(candidate, shape, layout, call, ordered=cluster.overlaps, check=check)
    check()
    return Answer(question, layout, work_of(programs), sent(programs), play(programs, cluster))


def sent(programs: list[Program]) -> Ints:
    """Return (ranks, ranks) the bytes from each rank to each."""
    traffic = np.zeros((len(programs), len(programs)), dtype=np.int64)
    for rank, program in enumerate(programs):
        for action in program.each():
            for peer, nbytes in action.sends if isinstance(action, Post) else ():
                traffic[rank, peer] += nbytes
    return traffic


def work_of(programs: list[Program]) -> Ints:
    """Return (ranks, steps) the area of each computation in forward."""
    rows = [
        [x.area for x in program.each() if isinstance(x, Compute) and x.what.endswith("forward")]
        for program in programs
    ]
    steps = max(map(len, rows))
    return np.array([row + [0] * (steps - len(row)) for row in rows], dtype=np.int64)

"""Exposure: how much of the communication of a step is not hidden under compute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from seqpar.comm.messages.exchange import Comm, Group
from seqpar.core.arguments import as_int, check_function
from seqpar.core.hooks import hooks


@dataclass(frozen=True)
class Exposure:
    """How long a step took in each of several rounds; the properties are medians over rounds.

    Attributes:
        rounds: three times for each round, in seconds of the slowest rank: the step as it is, with
            exchanges that send nothing, and with no attention computed.
    """

    rounds: tuple[tuple[float, float, float], ...]

    @property
    def total(self) -> float:
        """The seconds of the step as it is."""
        return statistics.median(total for total, _, _ in self.rounds)

    @property
    def without_communication(self) -> float:
        """The seconds of the step with exchanges that send nothing."""
        return statistics.median(without for _, without, _ in self.rounds)

    @property
    def communication(self) -> float:
        """The seconds of the step with no attention computed."""
        return statistics.median(communication for _, _, communication in self.rounds)

    @property
    def fractions(self) -> list[float]:
        """Each round's (total − without_communication) / communication."""
        return [
            (total - without_communication) / communication
            for total, without_communication, communication in self.rounds
        ]

    @property
    def fraction(self) -> float:
        """The share of communication that is not hidden: the median of `fractions`.

        It is above 1 where communication costs more than it takes alone: where ranks with uneven
        work wait for each other in turn, or where messages slow the compute. Otherwise a value
        above 1 is noise, which shows in fractions that differ widely.
        """
        return statistics.median(self.fractions)


def exposure(step: Callable[[], object], group: Group, rounds: int = 5) -> Exposure:
    """Measure how much of the communication of `step` is not hidden under compute.

    All ranks of `group` call this with the same step. A round runs it in three ways: as it is, with
    exchanges that send nothing, and with no attention computed. One round warms up, and `rounds`
    are measured. In the latter two ways the results are arbitrary, so a step must not update what
    you want to keep. The numbers are the same on all ranks. Time that ranks spend waiting for each
    other because their work is uneven counts as exposed: zigzag layouts avoid it. A stall in one
    round does not change a median of three or more.
    """
    comm, rounds = Comm.of(group), as_int("rounds", rounds, 1, 2**20)
    check_function("step", step)

    def timed() -> float:
        comm.synchronize()
        comm.all_gather(torch.zeros(1, device=comm.device), label="exposure")
        comm.synchronize()  # ranks begin at once: on a GPU, this alone waits for the others
        start = time.perf_counter()
        step()
        comm.synchronize()
        seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        return max(map(float, comm.all_gather(seconds.to(comm.device), label="exposure")))

    times: list[tuple[float, float, float]] = []
    for _ in range(rounds + 1):
        whole = timed()
        with hooks.set(skip_messages=True):
            compute = timed()
        with hooks.set(replace_compute=lambda area: None):
            communication = timed()
        times.append((whole, compute, communication))
    return Exposure(tuple(times[1:]))

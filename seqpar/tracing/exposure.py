"""Exposure: how much of a step's communication is not hidden under computation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from seqpar.comm.messages.comm import Comm, Group
from seqpar.core.arguments import as_int, check_function
from seqpar.core.compiling import outside_graphs
from seqpar.core.hooks import set_hooks


@dataclass(frozen=True)
class Exposure:
    """The times of a step that was measured in several rounds. The properties are medians over the
    rounds.

    Attributes:
        rounds: three times per round, in seconds of the slowest rank: the unchanged step, the step
            with exchanges that send nothing, and the step without the computation of attention.
    """

    rounds: tuple[tuple[float, float, float], ...]

    @property
    def total(self) -> float:
        """The seconds of the unchanged step."""
        return statistics.median(total for total, _, _ in self.rounds)

    @property
    def without_communication(self) -> float:
        """The seconds of the step with exchanges that send nothing."""
        return statistics.median(without for _, without, _ in self.rounds)

    @property
    def communication(self) -> float:
        """The seconds of the step without the computation of attention."""
        return statistics.median(communication for _, _, communication in self.rounds)

    @property
    def fractions(self) -> list[float]:
        """(total − without_communication) / communication of each round."""
        return [
            (total - without_communication) / communication
            for total, without_communication, communication in self.rounds
        ]

    @property
    def fraction(self) -> float:
        """The fraction of communication that is not hidden: the median of `fractions`.

        A round runs the step three times. The fraction is computed for each round separately,
        because other load on the machine slows all three runs of a round. Use at least three
        rounds, so that a stall in one round does not change the median.

        The fraction is above 1 if communication adds more time to the step than communication takes
        without computation. Possible reasons are that ranks with uneven work wait for each other,
        or that messages slow down the computation. If `fractions` differ widely, a value above 1 is
        noise.
        """
        return statistics.median(self.fractions)


@outside_graphs
def exposure(step: Callable[[], object], group: Group, rounds: int = 5) -> Exposure:
    """Measure how much of the communication of `step` is not hidden under computation.

    All ranks of `group` call this with the same step. A round runs the step three times: unchanged,
    with exchanges that send nothing, and without the computation of attention. One round warms up,
    and `rounds` rounds are measured. In the second and third run, results are arbitrary, so the
    step must not update anything that you want to keep. The step must make its attention calls in
    this thread. All ranks get the same numbers.

    If the work of ranks is uneven, the time for which they wait for each other counts as exposed.
    Zigzag layouts avoid such waiting.
    """
    comm, rounds = Comm.of(group), as_int("rounds", rounds, 1, 2**20)
    check_function("step", step)

    def timed() -> float:
        comm.synchronize()
        comm.all_gather(torch.zeros(1, device=comm.device), label="exposure")
        comm.synchronize()  # on a GPU, only this call waits for the other ranks
        start = time.perf_counter()
        step()
        comm.synchronize()
        seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        return max(map(float, comm.all_gather(seconds.to(comm.device), label="exposure")))

    times: list[tuple[float, float, float]] = []
    for _ in range(rounds + 1):
        # The other two runs cannot be replayed.
        with set_hooks(replays=False):
            whole = timed()
        with set_hooks(skip_messages=True):
            compute = timed()
        with set_hooks(replace_compute=lambda area: None):
            communication = timed()
        times.append((whole, compute, communication))
    return Exposure(tuple(times[1:]))

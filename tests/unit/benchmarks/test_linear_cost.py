"""The cost model: its constants can be found from times, and it hides what can be hidden."""

import pytest

from benchmarks.network.linear_contenders import CONTENDERS
from benchmarks.papers import linear_cost


def test_the_fit_recovers_the_constants():
    constants = {"call": 1e-3, "area": 2e-8, "latency": 3e-3, "byte": 4e-8}
    samples = []
    for name in CONTENDERS:
        for tokens in (512, 4096):
            parts = linear_cost.passes(tokens, 16, 128)
            machine = linear_cost.Machine(2, 0.0, 0.0, 0.0, burst=2**18)
            made = linear_cost.replace(machine, **constants)
            samples.append(
                (
                    name,
                    machine,
                    parts,
                    linear_cost.compute(name, made, parts),
                    linear_cost.communication(name, made, parts),
                )
            )
    assert linear_cost.fit(samples) == pytest.approx(constants)


def test_what_hides_and_what_does_not():
    """With plenty to compute, LASP-2 takes as long as data parallel, and LASP-1 its hops longer."""
    parts = linear_cost.passes(2**20, 16, 128)
    machine = linear_cost.Machine(4, area=1e-9, latency=1e-3, byte=1e-9)
    own = linear_cost.seconds("data parallel", machine, parts)
    for name in ("LASP-2 all_gather", "LASP-2 scan"):
        assert linear_cost.seconds(name, machine, parts) == pytest.approx(own)
    hops = 2 * 3 * (1e-3 + parts[0].state * 1e-9)
    assert linear_cost.seconds("LASP-1", machine, parts) == pytest.approx(own + hops)

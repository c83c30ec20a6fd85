"""What the validation of simulations measures and fits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulate.validation import asleep, by_place, cells, fit, joined, linked, summary
from seqpar.balance import Cluster
from seqpar.costs.grid import Tasks
from seqpar.simulate import error_model
from seqpar.simulate.recording.program import Compute, Operators, SoftmaxCompute

ROOT = Path(__file__).parents[3]


def test_cells_cover_cores_and_emulated_links():
    found = cells(1024)
    assert {(x.where, x.ranks) for x in found} == {
        ("cores", 1), ("cores", 2), ("cores", 4), ("links", 2), ("links", 4),
    }  # fmt: skip
    assert {x.made().ranks for x in found} == {1, 2, 4}
    assert all((x.pair_seconds > 0) == (x.where == "links") for x in found)


def test_a_link_is_fitted():
    sizes = [1000, 2000, 40000]
    assert fit(sizes, [0.5 + 1e-3 * x for x in sizes]) == pytest.approx((0.5, 1e-3))
    assert fit(sizes, [1e-3 * x - 0.1 for x in sizes])[0] == 0.0


def test_computes_on_links_sleep_and_others_do_not():
    device = Cluster.preset("1x1-h100").device
    attention = Compute(SoftmaxCompute(Tasks.of(64, 64, 64 * 64), 4, 64, False), area=100)
    other = Compute(Operators(0, int(device.memory_bandwidth)))
    both = [attention, other]
    on = {x.where: asleep(x.pair_seconds, device)(both) for x in cells(1024)}
    each = next(x.pair_seconds for x in reversed(cells(1024)))
    assert on["links"] == {id(attention): 100 * each, id(other): 1.0}
    assert on["cores"][id(other)] == 1.0 and on["cores"][id(attention)] != 100 * each


def test_links_are_of_what_exchanges_took():
    """On cores each end of a message has half of what one took that is sent and received."""
    cores = replace(Cluster.preset("1x2-h100"), overlaps=False)

    def network(function, sizes, rounds, peers, computing=False):
        crowded = 1.25 if peers > 1 else 1.0
        return [[crowded * (1e-4 + 1e-9 * size) for size in sizes]] * 4

    found = joined(network, "cores", 4, 3)
    assert found.latency == pytest.approx(5e-5) and found.rate == pytest.approx(2e9)
    assert found.shared == 1.0 and linked(cores, "cores", 4, found).inside == found
    found = joined(network, "links", 4, 3)
    assert found.latency == pytest.approx(1e-4) and found.rate == pytest.approx(1e9)
    assert found.shared == pytest.approx(0.8)
    on = linked(cores, "links", 4, found)
    assert on.between == found and on.nodes == 4 and on.overlaps


def test_errors_are_summed_up_by_place():
    rows = [
        {"where": "cores", "ranks": n, "error": error, "spread": 0.01}
        for n, error in ((1, 0.02), (2, -0.1), (2, 0.03))
    ]
    found = summary(rows)
    assert found["cores, 2"] == pytest.approx({"median": 0.065, "worst": 0.1, "spread": 0.01})
    assert found["all"]["median"] == 0.03
    errors = [{"where": "cores", "error": x} for x in (0.03, -0.04)]
    assert by_place(errors) == pytest.approx({"cores": (0.0025 / 2) ** 0.5})


def test_the_page_and_recommend_use_the_committed_errors():
    (file,) = (ROOT / "benchmarks" / "results").glob("*/simulate.json")
    rows = json.loads(file.read_text())["rows"]
    assert error_model.validated() == by_place(rows)
    page = (ROOT / "docs" / "benchmarks" / "simulate.md").read_text()
    for name, x in summary(rows).items():
        figures = " | ".join(f"{x[figure]:.1%}" for figure in ("median", "worst", "spread"))
        of = "" if name == "all" else " rank" if name.endswith("1") else " ranks"
        assert f"| {name}{of} | {figures} |" in page

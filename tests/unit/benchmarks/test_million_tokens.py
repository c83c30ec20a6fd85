"""The benchmarks of the guide "A million tokens", and its tables."""

import json

import pytest

from benchmarks.simulate import flagship, rehearsal
from tests.support.pages import ROOT


def committed(name):
    (file,) = (ROOT / "benchmarks/results").glob(f"*/{name}.json")
    return json.loads(file.read_text())


@pytest.mark.parametrize("benchmark", [flagship, rehearsal])
def test_the_guide_has_the_committed_tables(benchmark):
    page = (ROOT / "docs/guides/million_tokens.md").read_text()
    name = benchmark.__name__.rpartition(".")[2]
    missing = [x for x in benchmark.tables(committed(name)).values() if f"\n{x}\n" not in page]
    assert not missing


def test_the_goals_of_the_flagship_are_predicted():
    for case in ("one document", "packed"):
        found = committed("flagship")[case]
        assert found["bytes"] <= 40e9 and found["seconds_high"] <= 300


@pytest.mark.parametrize(
    ("last", "fits", "grows"), [(3.0e9, True, True), (3.3e9, True, False), (5e9, False, False)]
)
def test_a_rehearsal_knows_its_goals(last, fits, grows):
    rows = [
        {"tokens": 2000, "bytes": 1e9, "predicted_bytes": 1.5e9},
        {"tokens": 4000, "bytes": last, "predicted_bytes": 3.5e9},
    ]
    found = rehearsal.summary(rows)
    assert (found["fits"], found["grows_as_predicted"]) == (fits, grows)
    assert found["bytes_per_token"]["predicted_bytes"] == 2e6

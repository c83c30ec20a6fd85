"""The benchmark of the longest batch."""

import json

import pytest

from benchmarks.simulate import longest_batch
from tests.support.pages import ROOT


def test_the_page_has_the_committed_table():
    (file,) = (ROOT / "benchmarks/results").glob("*/longest-batch.json")
    found = json.loads(file.read_text())
    page = (ROOT / "docs/benchmarks/simulate.md").read_text()
    assert f"\n\n{longest_batch.table(found['rows'])}\n\n" in page
    assert f"which {found['within_goal']} of {len(found['rows'])} limits reach" in page


@pytest.mark.parametrize("most", [700, 1500, 1999, 5000])
def test_bisection_finds_the_longest_batch(most):
    found = longest_batch.bisected(lambda tokens: tokens <= most, 2000)
    assert most - longest_batch.STEP < found <= most


def test_a_larger_limit_allows_a_longer_batch():
    small, large = (longest_batch.recommended(x * 2**20, 2048).longest for x in (128, 256))
    assert 2.0 < large / small < 2.5

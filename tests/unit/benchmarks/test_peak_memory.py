"""The benchmark of simulated memory."""

import json

from benchmarks.simulate import peak_memory
from tests.support.pages import ROOT


def test_the_page_has_the_committed_table():
    (file,) = (ROOT / "benchmarks/results").glob("*/peak-memory.json")
    found = json.loads(file.read_text())
    page = (ROOT / "docs/benchmarks/simulate.md").read_text()
    assert f"\n\n{peak_memory.table(found['rows'])}\n\n" in page
    assert f"which {found['within_goal']} of {len(found['rows'])} settings reach" in page


def test_a_larger_step_has_a_larger_simulated_peak():
    setting = peak_memory.SETTINGS[0]
    small, large = (peak_memory.simulated(setting, tokens) for tokens in (512, 1024))
    assert 1.9 < large / small < 2.1

"""Each strategy's page has all its parts, and measured figures match the committed results."""

import json
import re

import pytest

from tests.support.pages import ROOT, python_of
from tests.tools import measured
from tests.tools.measured import GENERATED, SOURCES

STRATEGIES = sorted(SOURCES)
PARTS = "Algorithm", "When to use it", "Bytes", "Memory", "Options"
ENVIRONMENT = {
    "device": "Some processor",
    "cores": 4,
    "versions": {"torch": "2.13.0"},
    "date": "2026-01-02T03:04:05+00:00",
}
RANKS = {
    "environment": ENVIRONMENT,
    "rows": [
        {"kind": "kda", "transport": "tree", "pass": "forward", "speed": 0.875},
        {"kind": "kda", "transport": "tree", "pass": "forward+backward", "speed": 0.75},
    ],
}


def page(strategy):
    """The path of a strategy's page."""
    return ROOT / f"docs/strategies/{strategy}.md"


def part(strategy, heading):
    """The text of a page below a heading."""
    return page(strategy).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_every_strategy_has_measurements_or_a_reason():
    pages = {path.stem for path in page("ring").parent.glob("*.md")}
    assert pages == {*STRATEGIES, "index"}
    sections = {match["name"] for match in GENERATED.finditer(measured.PAGE.read_text())}
    assert sections == {*STRATEGIES, "settings"}


def test_measured_figures_match_the_committed_results():
    assert measured.PAGE.read_text() == measured.written(), "run python -m tests.tools.measured"


def test_handwritten_remarks_contain_no_figures():
    """A figure in a remark would stay when the results change. fp32 and LASP-2 are names."""
    remarks = GENERATED.sub("", measured.PAGE.read_text())
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", remarks)
    assert not re.findall(r"(?<![\w-])\d.*", prose)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_page_has_a_paper_and_all_parts(strategy):
    text = page(strategy).read_text()
    assert "](https://arxiv.org/abs/" in text.partition("\n## ")[0]
    assert set(re.findall(r"^## (.*)$", text, re.MULTILINE)) >= {*PARTS}
    assert f"](../images/schedule_{strategy}.svg)" in part(strategy, "Algorithm")
    assert "](../benchmarks/strategies.md#" in text
    blocks = [x for x in python_of(page(strategy)) if x.text in part(strategy, "Bytes")]
    assert any(".traffic(" in block.text and block.output for block in blocks)


def test_tables_match_the_existing_results(tmp_path):
    (tmp_path / "some-processor").mkdir()
    (tmp_path / "some-processor/recurrent-ranks.json").write_text(json.dumps(RANKS))
    assert measured.tables("recurrent", tmp_path) == (
        "| what | where | forward | forward + backward | result |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| speed, relative to one process | 2 ranks, kda, tree | 0.88 | 0.75 | recurrent-ranks |\n"
        "\n"
        "The following has not been measured: speed on one core; steps on links; host time.\n"
    )
    assert measured.settings(tmp_path) == (
        "| result | machine | date | setting |\n"
        "| --- | --- | --- | --- |\n"
        "| [recurrent-ranks](recurrent.md) | Some processor, 4 cores, torch 2.13.0 | 2026-01-02 "
        "| ranks with one thread, and one process with one thread per rank. |\n"
    )


def test_tables_name_the_machine_when_several_measured(tmp_path):
    for machine in ("one", "two"):
        (tmp_path / machine).mkdir()
        (tmp_path / machine / "recurrent-ranks.json").write_text(json.dumps(RANKS))
    text = measured.tables("recurrent", tmp_path)
    assert "| recurrent-ranks, one |\n" in text and "| recurrent-ranks, two |\n" in text

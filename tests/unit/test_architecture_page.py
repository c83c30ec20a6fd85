"""The architecture page's table follows import-linter's, and its walks name files that exist."""

import re
import tomllib

import pytest

from tests.support.pages import ROOT

PAGE = ROOT / "docs/internals/architecture.md"

WALKS = {  # heading -> the folder from which its paths start
    "The call stack of attention": "seqpar",
    "The path of a server's request": "seqpar",
    "The path of a Hugging Face call": "seqpar/integrations/huggingface",
}


def section(heading):
    """The text below one heading."""
    return PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]


def test_table_of_packages_is_the_order_that_import_linter_checks():
    lines = section("Packages").splitlines()
    rows = [line.split("|")[1] for line in lines if line.startswith("| `")]
    shown = [re.findall(r"`([\w]+)(?:/|\.py)`", row) for row in rows]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (x["layers"] for x in contracts["contracts"] if x["type"] == "layers")
    assert shown == [layer.split(" | ") for layer in reversed(layers)]


@pytest.mark.parametrize("heading", WALKS)
def test_a_walk_has_numbered_steps(heading):
    steps = [int(number) for number in re.findall(r"^(\d+)\. ", section(heading), re.MULTILINE)]
    assert len(steps) >= 6 and steps == [*range(1, len(steps) + 1)]


@pytest.mark.parametrize("heading", WALKS)
def test_files_of_a_walk_exist(heading):
    own = section(heading)
    paths = set(re.findall(r"`([\w/]+(?:\.py|/))`", own))
    if heading == "The path of a Hugging Face call":
        paths.remove("integrations/huggingface/")
    missing = [path for path in paths if not (ROOT / WALKS[heading] / path).exists()]
    assert len(paths) > 6 and not missing, missing

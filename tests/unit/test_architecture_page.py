"""The architecture page's picture follows its table, and its walks name files that exist."""

import re

import pytest

from tests.support.pages import ROOT
from tests.tools import rooms

WALKS = {  # heading -> the folder from which its paths start
    "The way of a query": "seqpar",
    "The way of a server's request": "seqpar",
    "The way of a Hugging Face model": "seqpar/integrations/huggingface",
}


def walk(heading):
    """The text of one walk."""
    return rooms.PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]


def test_picture_follows_the_table_of_rooms():
    assert rooms.FILE.read_text() == rooms.drawn(), "run python -m tests.tools.rooms"


@pytest.mark.parametrize("heading", WALKS)
def test_a_walk_has_numbered_steps(heading):
    steps = [int(number) for number in re.findall(r"^(\d+)\. ", walk(heading), re.MULTILINE)]
    assert len(steps) >= 6 and steps == [*range(1, len(steps) + 1)]


@pytest.mark.parametrize("heading", WALKS)
def test_files_of_a_walk_exist(heading):
    own = walk(heading)
    paths = set(re.findall(r"`([\w/]+(?:\.py|/))`", own))
    if heading == "The way of a Hugging Face model":
        paths.remove("integrations/huggingface/")
    missing = [path for path in paths if not (ROOT / WALKS[heading] / path).exists()]
    assert len(paths) > 6 and not missing, missing

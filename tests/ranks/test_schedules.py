"""The pictures of schedules are what ranks do: of traces taken now, and drawn by the code here."""

import json

import pytest

from tests.tools.schedules import DATA, IMAGES, MOVES, RANKS, pictures, traced, written


@pytest.mark.parametrize("name", MOVES)
def test_a_schedule_is_what_ranks_do(pool, name):
    kept = json.loads(DATA.read_text())[name]
    assert pool(RANKS, traced, name) == kept, "run python -m tests.tools.schedules"


def test_pictures_are_drawn_of_them():
    data = json.loads(DATA.read_text())
    assert DATA.read_text() == written(data)
    for file, drawn in pictures(data).items():
        assert (IMAGES / file).read_text() == drawn, file

"""Say what a rank sends, from geometry alone: nothing is communicated or computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple


class Traffic(NamedTuple):
    """What a rank sends to one peer in one step of a pass.

    Attributes:
        direction: "forward" or "backward".
        step: the strategy's step that needs the messages.
        peer: the rank that they go to.
        messages: how many there are; empty ones are not sent.
        bytes: their sizes, summed.
    """

    direction: str
    step: int
    peer: int
    messages: int
    bytes: int


def summed(rows: Iterable[Traffic]) -> list[Traffic]:
    """Return the rows with those of one direction, step and peer added up, and empty ones left out.

    Forward comes before backward, then they are in order of steps and peers.
    """
    totals: dict[tuple[str, int, int], list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        if row.bytes:
            total = totals[row.direction, row.step, row.peer]
            total[0] += row.messages
            total[1] += row.bytes
    order = sorted(totals, key=lambda key: (key[0] == "backward", *key[1:]))
    return [Traffic(*key, *totals[key]) for key in order]

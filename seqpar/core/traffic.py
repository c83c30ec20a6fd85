"""The messages that a rank would send, as rows of a table. The messages are computed from the
geometry of a layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple


class Traffic(NamedTuple):
    """The messages from a rank to one peer in one step of a pass."""

    direction: str  # "forward" or "backward"
    step: int  # the strategy's step that needs the messages
    peer: int  # the rank that receives the messages
    messages: int  # empty messages are not sent
    bytes: int  # the sum over the messages


def summed(rows: Iterable[Traffic]) -> list[Traffic]:
    """Return the sum of the rows for each direction, step and peer, without empty rows.

    The sums of forward come first. The sums of each direction are sorted by step, then by peer.
    """
    totals: dict[tuple[str, int, int], list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        if row.bytes:
            total = totals[row.direction, row.step, row.peer]
            total[0] += row.messages
            total[1] += row.bytes
    order = sorted(totals, key=lambda key: (key[0] == "backward", *key[1:]))
    return [Traffic(*key, *totals[key]) for key in order]

"""Draw the rooms of seqpar/ for the architecture page: `python -m tests.tools.rooms`.

Bands are cut from the page's table, which the layer test compares with every import. The lowest
band holds the rooms that all others import.
"""

import re
from html import escape

from tests.tools.schedules import COLOURS, IMAGES, picture

PAGE = IMAGES.parent / "internals/architecture.md"
FILE = IMAGES / "rooms.svg"
BANDS = {  # title -> its first room; the next band's first room ends it
    "foundation": "core/",
    "attention": "attention/",
    "plans": "costs/",
    "strategies": "strategies/",
    "in a model": "integrations/",
    "before a run": "simulate/",
    "commands": "commands/",
}
CAPTIONS = {
    "core/": ("checks, dtypes,", "torch's private names"),
    "comm/": ("messages, faults,", "routing"),
    "layout/": ("owners of tokens,", "masks, tasks"),
    "masks.py": ("common masks",),
    "tracing/": ("what a call computed,", "sent and waited for"),
    "attention/": ("modules, operators,", "choice of backends"),
    "softmax/": ("keys, heads, queries", "or tasks move"),
    "linear/": ("states move",),
    "halo/": ("convolutions,", "token shifts"),
    "recurrent/": ("states decay", "with the data"),
    "costs/": ("a cluster, a model,", "and their costs"),
    "balance/": ("lengths of documents", "become plans"),
    "servers/": ("processes that compute", "for trainers"),
    "strategies/": ("one file per paper, and the registry",),
    "integrations/": ("Hugging Face, flash-attn, torchtitan and others",),
    "memory/": ("recomputing, offloading",),
    "elastic/": ("new groups", "without the dead"),
    "simulate/": ("strategies' code", "in virtual time"),
    "auto/": ("simulates, measures,", "chooses"),
    "bench/": ("the sweeps of", "a command"),
    "explore/": ("a strategy's page", "in a browser"),
    "commands/": ("one file per command",),
    "__main__.py": ("the list of commands",),
}
WIDTH, MARGIN, TITLE_WIDTH, GAP = 940, 20, 96, 10
BAND_HEIGHT, BOX_HEIGHT = 76, 64


def rooms():
    """Return the rooms of the page's table, in its order: a room imports earlier ones only."""
    table = PAGE.read_text().split("## Rooms")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [room for row in rows for room in re.findall(r"`([\w/.]+)`", row)]


def bands():
    """Return (title, rooms) of each band, the lowest first."""
    known, titles = rooms(), list(BANDS)
    edges = [*map(known.index, BANDS.values()), len(known)]
    assert edges == sorted(edges) and edges[0] == 0, "the bands follow the table"
    return [(title, known[edges[i] : edges[i + 1]]) for i, title in enumerate(titles)]


def box(room, x, y, width, colour):
    body = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BOX_HEIGHT}" rx="5" '
    body += f'fill="{colour}" fill-opacity="0.16" stroke="{colour}"/>'
    body += f'<text class="title" x="{x + 10:.1f}" y="{y + 20}">{escape(room)}</text>'
    for i, line in enumerate(CAPTIONS[room]):
        body += f'<text class="dim" x="{x + 10:.1f}" y="{y + 38 + 16 * i}">{escape(line)}</text>'
    return body


def drawn():
    """Return the text of the picture."""
    body, found = "", bands()
    space = WIDTH - 2 * MARGIN - TITLE_WIDTH
    for i, (title, members) in enumerate(found):
        y = MARGIN + BAND_HEIGHT * (len(found) - 1 - i)
        body += f'<text class="title" x="{MARGIN}" y="{y + 36}">{escape(title)}</text>'
        width = (space - GAP * (len(members) - 1)) / len(members)
        for j, room in enumerate(members):
            x = MARGIN + TITLE_WIDTH + j * (width + GAP)
            body += box(room, x, y, width, COLOURS[i % len(COLOURS)])
    bottom = MARGIN + BAND_HEIGHT * len(found)
    words = (
        "A room imports only rooms of lower bands and, within a band, some of those to its left."
    )
    body += f'<text class="dim" x="{MARGIN + TITLE_WIDTH}" y="{bottom + 8}">{words}</text>'
    label = "The rooms of seqpar in seven bands: a room imports rooms below it"
    return picture(WIDTH, bottom + 24, body, label)


if __name__ == "__main__":
    FILE.write_text(drawn())

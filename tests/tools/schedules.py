"""Draw which rank sends what and when: each strategy's schedule on 4 ranks, from real traces.

`python -m tests.tools.schedules` runs the strategies. It writes their events to
docs/images/schedules.json, without times, since times differ from run to run. Then it draws
docs/images/schedule*.svg from this file.
"""

import itertools
import json
import textwrap
from collections import defaultdict, deque
from html import escape
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

import seqpar
from tests.support.ranks import Pool

IMAGES = Path(__file__).parents[2] / "docs/images"
DATA = IMAGES / "schedules.json"
RANKS, PASSES = 4, ("forward", "backward")
UNEVEN = [0, 2048, 2560, 3072, 4096]  # documents of uneven lengths, so that tasks move
MOVES = {
    "ring": "keys and values, one rank's a step",
    "all_gather": "keys and values, all at once",
    "ulysses": "heads, there and back",
    "usp": "heads in a row, keys between rows",
    "mesh": "queries in a row, keys in a column",
    "token_ring": "queries one way, results the other",
    "disaggregated": "tasks, to whoever has time",
    "lasp2": "states, all at once",
    "zeco": "states, rank to rank",
    "recurrent": "maps, along a tree",
}
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")  # colours of ranks, as in all pictures
BESIDE = {"zeco", "recurrent"}  # strategies whose messages travel beside computes
HOP, LEAST = 0.3, 0.12  # times of a message and of the shortest compute; the longest takes 1
STYLE = """
.card{fill:#fff}.title{font-weight:700;fill:#222}.dim{fill:#667}.lane{stroke:#c8ccd4}
.hop{fill:none;stroke-linecap:round;stroke-dasharray:5 4;animation:go 1.2s linear infinite}
text{font:12px system-ui,"DejaVu Sans",sans-serif}
@keyframes go{to{stroke-dashoffset:-18}}
@media(prefers-reduced-motion:reduce){.hop{animation:none}}
@media(prefers-color-scheme:dark){.card{fill:#1b212b}.title{fill:#eee}.dim{fill:#a6afbd}
.lane{stroke:#475062}}
"""


def traced(group, name):
    """Return the events of this rank in a call and its backward, in order, without times."""
    comm, mesh = group, None
    if name in ("usp", "mesh"):
        mesh = DeviceMesh("cpu", torch.arange(RANKS).view(2, 2), mesh_dim_names=("outer", "inner"))
    if name in ("lasp2", "zeco"):
        transport = "scan" if name == "zeco" else "all_gather"
        attn = seqpar.LASP2Attention(group, transport=transport)
    elif name == "recurrent":
        attn = seqpar.RecurrentAttention(group, "gated_delta", "tree")
    else:
        attn = seqpar.make_attention(name, mesh or comm)
    uneven = name == "disaggregated"
    layout = seqpar.Layout.contiguous(UNEVEN, RANKS) if uneven else seqpar.Layout.zigzag(512, RANKS)
    if name in ("lasp2", "zeco", "recurrent"):
        layout = seqpar.Layout.contiguous(512, RANKS)
    q, k, v = (
        torch.randn(layout.tokens_on(attn.rank), heads, 16, requires_grad=True)
        for heads in (8, 4, 4)
    )
    options = {"causal": True}
    if name == "recurrent":
        gate = torch.zeros(len(k), 4)
        q, options = k, {"log_decay": gate, "beta": gate}
    with seqpar.trace() as trace:
        attn(q, k, v, layout, **options).sum().backward()
    events = sorted(trace.events, key=lambda event: event.start)
    if name in BESIDE:  # the order of events is random
        events.sort(key=lambda event: (event.what, event.kind != "compute"))
        events.sort(key=lambda event: event.what.endswith("backward"))
    shown = [x for x in events if x.kind != "flight" or x.bytes]
    return [[x.kind, x.what, x.step, list(x.peers), x.bytes, x.area] for x in shown]


def measured(pool):
    """Return the events of each strategy, by rank."""
    return {name: pool(RANKS, traced, name) for name in MOVES}


def written(data):
    """Return the text of the file: one line for each event."""
    blocks = []
    for name, ranks in data.items():
        rows = [",\n".join(f"  {json.dumps(x)}" for x in events) for events in ranks]
        blocks.append(f'"{name}": [\n [\n' + "\n ],\n [\n".join(rows) + "\n ]\n]")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def of_pass(ranks, direction):
    """Return the events of one pass."""
    return [[x for x in events if direction in x[1].split(",")[0]] for events in ranks]


def timed(ranks, beside):
    """Return computes (rank, start, stop) and messages (from, start, to, stop, bytes).

    The time of a compute is proportional to its size, and a message takes one hop. A wait delays
    what the rank does next. With `beside`, messages delay only the last compute.
    """
    largest = max(x[5] for events in ranks for x in events)
    posts, arrivals = defaultdict(deque), {}
    for _ in range(64):  # repeat until nothing changes, once for each message of a chain
        before = dict(arrivals)
        computes, messages, posts = [], [], defaultdict(deque)
        waits = defaultdict(itertools.count)
        for rank, events in enumerate(ranks):
            now = sending = 0.0
            last = max((i for i, x in enumerate(events) if x[0] == "compute"), default=0)
            sent = defaultdict(itertools.count)
            if beside:
                events = sorted(enumerate(events), key=lambda p: (p[0] == last, p[0]))
                last, events = len(events) - 1, [x for _, x in events]
            for i, (kind, what, _, peers, nbytes, area) in enumerate(events):
                if kind == "compute":
                    if beside and i == last:
                        now = max(now, sending)
                    length = max(area / largest, LEAST)
                    computes.append((rank, now, now + length))
                    now += length
                    sending = sending or now
                    continue
                clock = sending if beside else now
                if kind == "flight":
                    for peer in peers:
                        key = rank, peer, what, next(sent[peer, what])
                        posts[key] = clock
                        messages.append((key, clock, nbytes // len(peers)))
                else:
                    for peer in peers:
                        key = peer, rank, what, next(waits[peer, rank, what])
                        clock = max(clock, before.get(key, 0.0))
                if beside:
                    sending = clock
                else:
                    now = clock
        arrivals = {key: at + HOP for key, at in posts.items()}
        if arrivals == before:
            break
    drawn = [(key[0], at, key[1], at + HOP, nbytes) for key, at, nbytes in messages]
    return computes, drawn


def panel(ranks, direction, title, words, x, y, width, beside):
    """Draw a pass: one lane for each rank, its computes, and what it sends."""
    computes, messages = timed(of_pass(ranks, direction), beside)
    ends = [stop for *_, stop in computes] + [stop for *_, stop, _ in messages]
    scale = (width - 44) / max(ends)
    most = max((m[4] for m in messages), default=1)
    body = f'<text class="title" x="{x}" y="{y + 12}">{escape(title)}</text>'
    body += f'<text class="dim" x="{x}" y="{y + 28}">{escape(words)}</text>'
    lanes = [y + 50 + 32 * rank for rank in range(RANKS)]
    for rank, at in enumerate(lanes):
        body += f'<text class="dim" x="{x}" y="{at + 4}">{rank}</text>'
        body += f'<path class="lane" d="M{x + 14} {at}H{x + width}"/>'
    for rank, start, stop in computes:
        left, right = x + 16 + start * scale, x + 16 + stop * scale
        body += f'<rect x="{left:.1f}" y="{lanes[rank] - 8}" width="{right - left - 1.5:.1f}" '
        body += f'height="16" rx="3" fill="{COLOURS[rank]}"/>'
    for source, start, target, stop, nbytes in messages:
        x0, x1 = x + 16 + start * scale, x + 16 + stop * scale
        y0, y1 = lanes[source], lanes[target]
        y0, y1 = (y0 + 8, y1 - 8) if target > source else (y0 - 8, y1 + 8)
        middle = (y0 + y1) / 2
        weight = 0.9 + 2.1 * (nbytes / most) ** 0.5
        body += f'<path class="hop" stroke="{COLOURS[source]}" stroke-width="{weight:.1f}" '
        body += f'd="M{x0:.1f} {y0}C{x0:.1f} {middle} {x1:.1f} {middle} {x1:.1f} {y1}"/>'
    return body


def picture(width, height, body, label):
    """Return a whole file: a card that is readable on light and dark pages."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
    head += f'width="{width}" height="{height}" role="img" aria-label="{escape(label)}">'
    card = f'<rect class="card" width="{width}" height="{height}" rx="10"/>'
    return f"{head}<style>{STYLE}</style>{card}{body}</svg>\n"


def legend(x, y, characters):
    """Draw what the signs of a panel mean, in lines of at most this many characters."""
    body = f'<text class="title" x="{x}" y="{y + 12}">How to read this</text>'
    words = (
        "A lane is a rank, time goes to the right, and a bar is what the rank computes.",
        "A line is what it sends, and to whom: the thicker, the more bytes.",
        "Forward of 512 tokens on 4 ranks, 8 query and 4 KV heads; of disaggregated 4,096.",
        "Not to scale: a message takes as long as any other one.",
    )
    at = y + 38
    for i, text in enumerate(words):
        if i == 0:
            body += f'<path class="lane" d="M{x} {at}H{x + 60}"/>'
            body += f'<rect x="{x + 8}" y="{at - 8}" width="36" height="16" rx="3" '
            body += f'fill="{COLOURS[0]}"/>'
        elif i == 1:
            body += f'<path class="hop" stroke="{COLOURS[0]}" stroke-width="3" '
            body += f'd="M{x} {at}H{x + 60}"/>'
        lines = textwrap.wrap(text, characters)
        for j, line in enumerate(lines):
            body += f'<text class="dim" x="{x + 76}" y="{at + 4 + 15 * j}">{escape(line)}</text>'
        at += 17 + 15 * len(lines)
    return body


def kib(ranks, direction):
    """Return as text what all ranks send in a pass."""
    sent = sum(x[4] for events in of_pass(ranks, direction) for x in events)
    return f"{sent / 1024:,.0f} KiB sent by all ranks"


def pictures(data):
    """Return {name of a file: text of its picture}."""
    found = {
        "schedules.svg": overview(data, 3, 290, 84),
        "schedules_narrow.svg": overview(data, 2, 200, 58),  # for phones
    }
    for name, ranks in data.items():
        one = "".join(
            panel(ranks, way, way, kib(ranks, way), 20, 18 + j * 178, 440, name in BESIDE)
            for j, way in enumerate(PASSES)
        )
        label = f"What moves when: {name} on 4 ranks, forward and backward"
        found[f"schedule_{name}.svg"] = picture(480, 356, one, label)
    return found


def overview(data, columns, wide, characters):
    """Return the picture of all strategies' forward, with panels that are `wide` wide."""
    body = ""
    for i, (name, ranks) in enumerate(data.items()):
        x, y = 20 + i % columns * (wide + 20), 18 + i // columns * 196
        body += panel(ranks, "forward", name, MOVES[name], x, y, wide, name in BESIDE)
    row, column = divmod(len(data), columns)  # the position of the legend, behind the last panel
    body += legend(20 + column * (wide + 20), 18 + row * 196, characters)
    height = 18 + (row + 1) * 196
    label = "What moves when: the forward of each strategy on 4 ranks"
    return picture(20 + columns * (wide + 20), height, body, label)


if __name__ == "__main__":
    with Pool(RANKS) as ranks:
        DATA.write_text(written(measured(ranks)))
    for file, drawn in pictures(json.loads(DATA.read_text())).items():
        (IMAGES / file).write_text(drawn)

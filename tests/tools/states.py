"""Draw how states of linear attention travel: `python -m tests.tools.states`.

Who sends to whom, in which step and how much, is what `traffic` says of each transport. What a
message has in it follows: its sender's span, and what that received in earlier steps.
"""

from html import escape
from itertools import groupby

import torch

import seqpar
from seqpar.comm.messages.exchange import Comm
from tests.tools.schedules import COLOURS, IMAGES, RANKS, picture

FILE = IMAGES / "states.svg"
DOCUMENTS = [0, 56, 64]  # the first is on all ranks, and the second whole on the last one
TRANSPORTS = {
    "all_gather": "LASP-2, Recurrent: each to all later ranks",
    "scan": "ZeCO, Recurrent: a sum, rank to rank",
    "tree": "Recurrent: sums of 1, 2, 4, … spans",
}
OPTIONS = {"scan": {"blocks": 1}}
WIDE, COLUMN, ROW = 290, 72, 34
CHIP = 18  # a state is a square, with a stripe in the colour of each span that is in it


def messages(transport):
    """Return (step, source, target, states' worth of bytes) of a forward, in order."""
    layout = seqpar.Layout.contiguous(DOCUMENTS, RANKS)
    attn = seqpar.RecurrentAttention(
        Comm("none", 0, RANKS), "scalar_decay", transport, **OPTIONS.get(transport, {})
    )
    q, k, v = torch.empty(3, layout.tokens_on(0), 2, 16, device="meta")
    gate = torch.empty(layout.tokens_on(0), 2, device="meta")
    found = []
    for rank in range(RANKS):
        for row in attn.traffic(q, k, v, layout, log_decay=gate, rank=rank):
            if row.direction == "forward":
                found.append((row.step, rank, row.peer, round(row.bytes / (2 * 16 * 16 * 4))))
    return sorted(found)


def travelled(sent):
    """Return what each message has in it, (spans,), and what in the end entered each rank."""
    received, carried = [set() for _ in range(RANKS)], []
    for _, step in groupby(sent, lambda message: message[0]):
        before = [set(spans) for spans in received]
        for _, source, target, states in step:
            assert states == 1, "each message is a state's worth, or what it has is not one sum"
            spans = {source} | before[source]
            assert not spans & received[target], "a span would count twice"
            carried.append(tuple(sorted(spans)))
            received[target] |= spans
    return carried, [tuple(sorted(spans)) for spans in received]


def lanes(sent):
    """Return the lane in which each message is drawn, so that none of them crosses another.

    A rank's messages of a step share a lane; those of another rank do if they begin where it ends.
    """
    found, first = [], 0
    for _, step in groupby(sent, lambda message: message[0]):
        step, ends = list(step), []  # the last rank that each lane of this step reaches
        for source, some in groupby(step, lambda message: message[1]):
            some = list(some)
            lane = next((i for i, end in enumerate(ends) if end <= source), len(ends))
            ends[lane : lane + 1] = [max(target for _, _, target, _ in some)]
            found += [first + lane] * len(some)
        first += len(ends)
    return found


def chip(spans, x, y):
    """Draw a state."""
    width = CHIP / len(spans)
    body = "".join(
        f'<rect x="{x + i * width:.1f}" y="{y}" width="{width:.1f}" height="{CHIP}" '
        f'fill="{COLOURS[rank]}"/>'
        for i, rank in enumerate(spans)
    )
    body += f'<rect class="lane" fill="none" x="{x}" y="{y}" width="{CHIP}" height="{CHIP}"/>'
    return body


def batch(x, y):
    """Draw the packed batch, and which rank holds what of it."""
    layout = seqpar.Layout.contiguous(DOCUMENTS, RANKS)
    scale, body = RANKS * COLUMN / DOCUMENTS[-1], ""
    for rank in range(RANKS):
        for document, start, stop in layout.spans(rank):
            left, right = ((DOCUMENTS[document] + at) * scale for at in (start, stop))
            faint = ' opacity="0.45"' * document
            body += f'<rect x="{x + left:.1f}" y="{y}" width="{right - left - 2:.1f}" height="16" '
            body += f'rx="3" fill="{COLOURS[rank]}"{faint}/>'
        body += f'<text class="dim" text-anchor="middle" x="{x + (rank + 0.5) * COLUMN}" '
        body += f'y="{y - 6}">rank {rank}</text>'
    return body


def panel(transport, x, y):
    """Draw a transport: time goes down, and a column is a rank."""
    sent = messages(transport)
    carried, entered = travelled(sent)
    rows, bottom = lanes(sent), y + 94 + (RANKS - 1) * ROW
    body = f'<text class="title" x="{x}" y="{y + 12}">{transport}</text>'
    body += f'<text class="dim" x="{x}" y="{y + 28}">{escape(TRANSPORTS[transport])}</text>'
    body += batch(x, y + 52)
    centre = [x + (rank + 0.5) * COLUMN for rank in range(RANKS)]
    for middle in centre:
        body += f'<path class="lane" d="M{middle} {y + 72}V{bottom - 14}"/>'
    for (_, source, target, _), row in zip(sent, rows, strict=True):
        at = y + 94 + ROW * row
        body += f'<path class="hop" stroke="{COLOURS[source]}" stroke-width="2.5" '
        body += f'd="M{centre[source] + 6} {at}H{centre[target] - 22}"/>'
    for (_, _, target, _), spans, row in zip(sent, carried, rows, strict=True):
        body += chip(spans, centre[target] - 22, y + 94 + ROW * row - CHIP / 2)
    body += f'<text class="dim" x="{x}" y="{bottom + 4}">enters</text>'
    for middle, spans in zip(centre, entered, strict=True):
        if spans:
            body += chip(spans, middle - CHIP / 2, bottom - CHIP / 2)
    most = max(sum(source == rank for _, source, _, _ in sent) for rank in range(RANKS))
    steps = len({step for step, *_ in sent})
    words = f"A rank sends at most {most}, in {steps} step{'s' * (steps > 1)}."
    body += f'<text class="dim" x="{x}" y="{bottom + 34}">{words}</text>'
    return body


def drawn():
    """Return the text of the picture."""
    body = "".join(
        panel(transport, 20 + i * (WIDE + 20), 18) for i, transport in enumerate(TRANSPORTS)
    )
    label = "How states travel from rank to rank: all_gather, scan and tree"
    return picture(20 + len(TRANSPORTS) * (WIDE + 20), 268, body, label)


if __name__ == "__main__":
    FILE.write_text(drawn())

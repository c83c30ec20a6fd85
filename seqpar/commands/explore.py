"""Draw a strategy on a batch: layout, work, bytes and predicted time, as one page."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from seqpar.core.arguments import as_int
from seqpar.explore.answer import answer
from seqpar.explore.drawing import milliseconds, size
from seqpar.explore.page import CHOICES, page
from seqpar.explore.question import Question
from seqpar.explore.server import HOST, listening
from seqpar.simulate.playback.playing import require_simpy

MEANINGS = {
    "lengths": "tokens of each document: 20000,4096 or 4096x3",
    "ranks": "how many ranks hold them",
    "strategy": "of softmax attention",
    "layout": "how documents are cut",
    "mesh": "of mesh and usp, the ranks of a row",
    "heads": "of q",
    "kv_heads": "of k and v",
    "head_dim": "of q, k and v",
    "window": "how many keys before its own a query sees; -1: all",
    "causal": "whether queries see no key behind their own",
    "dtype": "of q, k and v",
    "cluster": 'a preset such as 4x8-h100; "same": H100, as many as there are ranks',
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.epilog = (
        "Without --html a server on this machine's own address shows the page, and a form for the "
        "next: a page's address says all that it shows, so it can be shared."
    )
    for field in fields(Question):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=type(field.default),
            default=field.default,
            choices=CHOICES.get(field.name),
            help=MEANINGS[field.name],
        )
    parser.add_argument("--html", metavar="FILE", help="write the page there, and serve nothing")
    parser.add_argument("--port", type=int, default=8765, help="of the server; 0: any that is free")


def run(arguments: argparse.Namespace) -> int:
    """Write the page, or serve it until it is interrupted."""
    require_simpy()
    question = Question(
        **{field.name: getattr(arguments, field.name) for field in fields(Question)}
    )
    if arguments.html is not None:
        found = answer(question)
        try:
            Path(arguments.html).write_text(page(found, {}), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"html: {arguments.html}: {error.strerror}") from None
        sent = size(int(found.bytes.sum(1).max()))
        print(f"{arguments.html}: {milliseconds(found.outcome.seconds)}, {sent} sent at most")
        return 0
    try:
        server = listening(as_int("port", arguments.port, 0, 65535))
    except OSError as error:
        raise ValueError(f"port {arguments.port}: {error.strerror}") from None
    with server:
        asked = question.address()
        print(f"http://{HOST}:{server.server_port}/{'?' if asked else ''}{asked}", flush=True)
        server.serve_forever()
    return 0

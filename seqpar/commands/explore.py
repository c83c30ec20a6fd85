"""Draw a strategy on a batch as one page: layout, work, bytes and predicted time."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from seqpar.core.arguments import as_int
from seqpar.core.options import LENGTH_FORMS, dtype_name
from seqpar.explore.page import milliseconds, page, size
from seqpar.explore.page_server import HOST, listening
from seqpar.explore.question import CHOICES, Question, answer
from seqpar.simulate.playback.playing import require_simpy

MEANINGS = {
    "lengths": f"tokens of each document: {LENGTH_FORMS}",
    "ranks": "number of ranks",
    "strategy": "strategy of softmax attention",
    "layout": "how documents are cut",
    "mesh": "ranks per row of the strategies mesh and usp",
    "heads": "number of query heads",
    "kv_heads": "number of key and value heads",
    "head_dim": "dimension of each head",
    "window": "number of keys before its own that a query attends to; -1: all",
    "causal": "whether queries attend only to keys up to their own position",
    "dtype": "dtype of q, k and v",
    "cluster": 'a preset such as 4x8-h100; "same": one H100 for each rank',
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Without --html, a server on this machine's loopback address shows the page and a form to "
        "change it. A page's address contains all options, so you can share it."
    )
    for field in fields(Question):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=dtype_name if field.name == "dtype" else type(field.default),
            default=field.default,
            choices=CHOICES.get(field.name),
            help=MEANINGS[field.name],
        )
    parser.add_argument("--html", metavar="FILE", help="write the page to FILE and exit")
    parser.add_argument("--port", type=int, default=8765, help="server port; 0: any free port")


def run(arguments: argparse.Namespace) -> int:
    """Write the page, or serve it until interrupted."""
    require_simpy()
    question = Question(
        **{field.name: getattr(arguments, field.name) for field in fields(Question)}
    )
    if arguments.html is not None:
        result = answer(question)
        try:
            Path(arguments.html).write_text(page(result, {}), encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"html: {arguments.html} cannot be written: {error.strerror}"
            ) from None
        sent = size(int(result.bytes.sum(1).max()))
        print(f"{arguments.html}: {milliseconds(result.outcome.seconds)}, {sent} sent at most")
        return 0
    try:
        server = listening(as_int("port", arguments.port, 0, 65535))
    except OSError as error:
        raise ValueError(f"port: {arguments.port} cannot be used: {error.strerror}") from None
    with server:
        query = question.address()
        print(f"http://{HOST}:{server.server_port}/{'?' if query else ''}{query}", flush=True)
        server.serve_forever()
    return 0

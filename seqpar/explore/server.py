"""A server on this machine's own address, whose pages are what their addresses ask."""

from __future__ import annotations

from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from threading import Lock
from urllib.parse import parse_qsl, urlsplit

from seqpar.explore.answer import answer
from seqpar.explore.page import page
from seqpar.explore.question import Question

HOST = "127.0.0.1"
MOST_CHARACTERS = 8192  # of an address


def answered(query: str) -> tuple[int, str]:
    """Return the status and the page of an address's query."""
    asked: dict[str, str] = {}
    try:
        if len(query) > MOST_CHARACTERS:
            raise ValueError(f"the address must have at most {MOST_CHARACTERS} characters")
        asked = dict(parse_qsl(query, keep_blank_values=True, max_num_fields=32))
        return 200, page(answer(Question.of(asked)), asked, served=True)
    except (ValueError, ImportError) as error:
        return 400, page(None, asked, str(error), served=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # seconds that a connection may say nothing, as browsers' spare ones do
    answering = Lock()  # one question at a time: what is recorded is recorded in the whole process

    def do_GET(self) -> None:
        """Answer an address, for pages of this server and for whoever types it."""
        if self.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site"):
            self.send_error(403, "another site's page may not ask")
            return
        parts = urlsplit(self.path)
        status, body = (
            (404, "there is only /\n") if parts.path != "/" else self._answered(parts.query)
        )
        data = body.encode()
        self.send_response(status)
        self.send_header(
            "Content-Type", f"text/{'plain' if status == 404 else 'html'}; charset=utf-8"
        )
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):  # nobody waits for it any more
            self.wfile.write(data)

    def _answered(self, query: str) -> tuple[int, str]:
        with self.answering:
            return answered(query)

    def log_message(self, *_: object) -> None:
        """Say nothing: the pages do."""


def listening(port: int) -> HTTPServer:
    """Return a server that listens on this machine's own address; port 0 is any that is free."""
    return ThreadingHTTPServer((HOST, port), _Handler)

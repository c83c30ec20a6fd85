"""A server on this machine's own address, whose pages are what their addresses ask."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from urllib.parse import parse_qsl, urlsplit

from seqpar.core.web import BoundedServer, Handler
from seqpar.explore.answer import answer
from seqpar.explore.page import page
from seqpar.explore.question import Question

HOST = "127.0.0.1"
MAX_ADDRESS_CHARACTERS = 8192  # of an address


class _ClientHasLeft(Exception):
    """Nobody waits for an answer any more."""


def answered(query: str, check: Callable[[], None] = lambda: None) -> tuple[int, str]:
    """Return the status and the page of an address's query; `check` is as in `answer`."""
    asked: dict[str, str] = {}
    try:
        if len(query) > MAX_ADDRESS_CHARACTERS:
            raise ValueError(f"the address must have at most {MAX_ADDRESS_CHARACTERS} characters")
        asked = dict(parse_qsl(query, keep_blank_values=True, max_num_fields=32))
        return 200, page(answer(Question.of(asked), check), asked, served=True)
    except (ValueError, ImportError) as error:
        return 400, page(None, asked, str(error), served=True)


MAX_ANSWER_SECONDS = 120.0  # from a question to its answer, earlier questions included
_POLL_SECONDS = 0.1  # between two looks whether a waiting client has left


class _Handler(Handler):
    answering = Lock()  # one question at a time: what is recorded is recorded in the whole process

    def do_GET(self) -> None:
        """Answer an address, for pages of this server and for whoever types it."""
        if self.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site"):
            self.send_error(403, "another site's page may not ask")
            return
        parts = urlsplit(self.path)
        if parts.path != "/":
            status, body = 404, "there is only /\n"
        elif (found := self._answered(parts.query)) is not None:
            status, body = found
        else:
            return
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

    def _answered(self, query: str) -> tuple[int, str] | None:
        """Return the answer, or None if the client has left before it was there."""
        self.server.extend(self.connection, MAX_ANSWER_SECONDS)
        while not self.answering.acquire(timeout=_POLL_SECONDS):
            if self.client_has_left():
                return None
        try:
            self._check()
            return answered(query, self._check)
        except _ClientHasLeft:
            return None
        finally:
            self.answering.release()
            self.server.extend(self.connection)

    def _check(self) -> None:
        """Raise an exception if the client has left."""
        if self.client_has_left():
            raise _ClientHasLeft


def listening(port: int) -> BoundedServer:
    """Return a server that listens on this machine's own address; port 0 is any that is free."""
    return BoundedServer((HOST, port), _Handler)

"""A server on this machine's loopback address. It answers the question in the requested address."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from urllib.parse import parse_qsl, urlsplit

from seqpar.core.web import BoundedServer, Handler
from seqpar.explore.page import page
from seqpar.explore.question import Question, answer

HOST = "127.0.0.1"
MAX_ADDRESS_CHARACTERS = 8192
MAX_ANSWER_SECONDS = 120.0  # includes waiting for earlier questions
_POLL_SECONDS = 0.1  # between checks whether a waiting client has left


class _ClientHasLeft(Exception):
    pass


def answered(query: str, check: Callable[[], None] = lambda: None) -> tuple[int, str]:
    texts: dict[str, str] = {}
    try:
        if len(query) > MAX_ADDRESS_CHARACTERS:
            raise ValueError(
                f"the address must have at most {MAX_ADDRESS_CHARACTERS} characters, got "
                f"{len(query)}"
            )
        texts = dict(parse_qsl(query, keep_blank_values=True, max_num_fields=32))
        return 200, page(answer(Question.of(texts), check), texts, served=True)
    except (ValueError, ImportError) as error:
        return 400, page(None, texts, str(error), served=True)


class _Handler(Handler):
    answering = Lock()  # one question at a time, because recording affects the whole process

    def do_GET(self) -> None:
        """Answer a request, unless a page of a different site has caused it."""
        if self.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site"):
            self.send_error(403, "pages of other sites cannot use this server")
            return
        parts = urlsplit(self.path)
        if parts.path != "/":
            status, kind, body = 404, "plain", "there is only /\n"
        elif (response := self._answered(parts.query)) is not None:
            kind = "html"
            status, body = response
        else:
            return
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):  # the client has left
            self.wfile.write(data)

    def _answered(self, query: str) -> tuple[int, str] | None:
        """Return the answer, or None if the client leaves before the answer is ready."""
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
        if self.client_has_left():
            raise _ClientHasLeft


def listening(port: int) -> BoundedServer:
    return BoundedServer((HOST, port), _Handler)

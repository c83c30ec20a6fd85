"""The sessions of a server's clients.

A session lasts as long as the call `Session`. The call ends when the client leaves, when its
connection is lost, when the client reads no events, when its certificate is revoked, or when the
server stops.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from seqpar.servers.server.account import Client
from seqpar.servers.wire.limits import Limits

SECRET_BYTES = 16


class RefusedError(Exception):
    """The server refuses what a client asks. A later request may succeed."""


class FullError(RefusedError):
    """The server has too many requests or sessions."""


class LeavingError(RefusedError):
    """The server is about to leave, and accepts nothing more."""


class UntrustedError(RefusedError):
    """The caller is another user, or its certificate is not trusted."""


class StaleSessionError(RefusedError):
    """The session has ended, or belongs to another certificate."""


@dataclass(eq=False)
class Session:
    """One client's session."""

    client: Client
    certificate: bytes  # as PEM; b"" without certificates
    most: int  # requests that it may have without a result
    requests: int = 0  # without a result
    calls: set[asyncio.Task[None]] = field(default_factory=set)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request, or raise a FullError if the session has too many."""
        if self.requests >= self.most:
            raise FullError(f"requests: the session may have {self.most} without a result")
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1


class Sessions:
    """The sessions of a server, by their secrets."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._sessions: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def begin(self, name: str, certificate: bytes) -> Session:
        """Begin a session, or raise a FullError."""
        own, most = self._of(name), self._limits.clients
        free = most - len(self) - 1
        if free < 0 or (name and own and own + 1 > free):
            raise FullError(f"clients: the server has {len(self)} already of {most}")
        # With all requests for each session, the payloads of a name with many sessions would delay
        # those of other names.
        share = max(1, self._limits.requests // (1 + own)) if name else self._limits.requests
        client = Client(secrets.token_bytes(SECRET_BYTES), name)
        self._sessions[client.session] = session = Session(client, certificate, share)
        return session

    def _of(self, name: str) -> int:
        return sum(session.client.name == name for session in self)

    def find(self, secret: bytes, name: str) -> Session:
        """Return the session with this secret, or raise a StaleSessionError."""
        session = self._sessions.get(secret)
        if session is None or session.client.name != name:
            raise StaleSessionError("session: this server does not know it")
        return session

    def end(self, session: Session) -> None:
        """End a session, and all of its calls."""
        self._sessions.pop(session.client.session, None)
        for call in session.calls:
            call.cancel()

    @contextmanager
    def call(self, session: Session) -> Iterator[None]:
        """Count this task of asyncio as a call of the session.

        Raises a StaleSessionError when the session ends.
        """
        task = asyncio.current_task()
        assert task is not None
        session.calls.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if session.client.session in self._sessions:
                raise
            raise StaleSessionError("session: it has ended") from None
        finally:
            session.calls.discard(task)

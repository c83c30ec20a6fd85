"""The sessions of a server's clients.

A session lasts as long as the client's call `Session`. This call ends when the client ends it, when
the connection is lost, when the client reads no events, when the client's certificate is no longer
trusted, or when the server stops. A *name* is the name in a client's certificate.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from seqpar.servers.server.account import Client
from seqpar.servers.wire.limits import Limits

SECRET_BYTES = 16


class RefusedError(Exception):
    """The server refuses a call. The client can try again later, or in a new session."""


class FullError(RefusedError):
    """The server has too many requests or sessions."""


class LeavingError(RefusedError):
    """The server is about to leave, and accepts no further requests."""


class UntrustedError(RefusedError):
    """The caller belongs to a different user, or its certificate is not trusted."""


class StaleSessionError(RefusedError):
    """The session has ended, or belongs to a client with a different name."""


@dataclass(eq=False)
class Session:
    client: Client
    certificate: bytes  # in PEM format; b"" if the server uses no certificates
    task: asyncio.Task[Any]  # the task that answers the client's call `Session`
    most: int  # the most requests without a result
    requests: int = 0  # the current number of requests without a result
    calls: set[asyncio.Task[None]] = field(default_factory=set)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Within this context, count one more request of the session. Raises a FullError if the
        session has too many requests.
        """
        if self.requests >= self.most:
            raise FullError(f"requests: the session may have {self.most} without a result")
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1


class Sessions:
    """The sessions of a server. Each session is found by its secret, which only the client of the
    session knows.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._sessions: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def begin(self, name: str, certificate: bytes) -> Session:
        """Begin a session for the gRPC call that the current asyncio task answers.

        Raises a FullError if there are too many sessions. A name that has sessions already can
        begin another session only if afterwards at least as many sessions are free as the name has.
        """
        own, most = self._of(name), self._limits.clients
        free = most - len(self) - 1
        if free < 0 or (name and own and own + 1 > free):
            reason = f"the server has {len(self)} of at most {most} sessions, {own} of this name"
            raise FullError(f"clients: {reason}")
        # The more sessions a name has, the fewer requests a new session may have. Otherwise, the
        # payloads of a name with many sessions would delay the payloads of other names.
        share = max(1, self._limits.requests // (1 + own)) if name else self._limits.requests
        client = Client(secrets.token_bytes(SECRET_BYTES), name)
        task = asyncio.current_task()
        assert task is not None
        self._sessions[client.session] = session = Session(client, certificate, task, share)
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
        self._sessions.pop(session.client.session, None)
        for call in session.calls:
            call.cancel()

    @contextmanager
    def call(self, session: Session) -> Iterator[None]:
        """Within this context, the current asyncio task is a call of the session.

        If the session ends, the task is cancelled, and the context raises a StaleSessionError.
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

"""The audit log of a server: sessions, faults of key files, and unexpected errors."""

from __future__ import annotations

import logging
import time

from seqpar.servers.wire.texts import printable

AUDIT = logging.getLogger("seqpar.servers.audit")
_MAX_LINES, _SECONDS = 100, 10.0  # a flood of clients must not fill a disk
_MAX_CHARACTERS = 200


class Audit:
    """Writes the audit log, but at most 100 lines in 10 s.

    A line identifies a client by the name in its certificate and by its connection. No line
    contains the secret of a session.
    """

    def __init__(self) -> None:
        self._until, self._lines, self._dropped = 0.0, 0, 0

    def write(self, level: int, event: str, name: str, peer: str, detail: str) -> None:
        now = time.monotonic()
        if now > self._until:
            if self._dropped:
                AUDIT.warning("%d lines were left out", self._dropped)
            self._until, self._lines, self._dropped = now + _SECONDS, 0, 0
        self._lines += 1
        if self._lines > _MAX_LINES:
            self._dropped += 1
            return
        client = printable(" ".join(filter(None, [name, peer])))
        AUDIT.log(level, "%s: client %s: %s", event, client, printable(detail)[:_MAX_CHARACTERS])

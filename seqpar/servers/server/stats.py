"""What a server counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Stats:
    """Counts since a server's start.

    Attributes:
        tasks: computed and sent back.
        tokens: query rows of these.
        bytes: of their payloads and results.
        refused: requests that were malformed, above a cap, too late, or met a full server.
        damaged: what was no message at all.
    """

    tasks: int = 0
    tokens: int = 0
    bytes: int = 0
    refused: int = 0
    damaged: int = 0

"""What a pool raises."""

from __future__ import annotations


class StepLostError(Exception):
    """A cache is not where it was, or its server did not answer: nobody but us sees this.

    Attributes:
        blame: whether that server is there, and has failed.
    """

    def __init__(self, reason: str, blame: bool) -> None:
        super().__init__(reason)
        self.blame = blame


class ServersError(RuntimeError):
    """No server computed a task within its deadline, and it was not to be computed at home."""

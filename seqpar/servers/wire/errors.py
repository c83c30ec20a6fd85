"""The errors of a pool."""

from __future__ import annotations


class StepLostError(Exception):
    """A cache was lost, or its server did not answer. The cache's code catches this error.

    Attributes:
        blame: whether a server that is still connected is at fault.
    """

    def __init__(self, reason: str, blame: bool) -> None:
        super().__init__(reason)
        self.blame = blame


class ServersError(RuntimeError):
    """No server computed a task within its deadline, and the pool has `home=False`."""

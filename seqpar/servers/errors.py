"""What a pool raises."""

from __future__ import annotations


class ServersError(RuntimeError):
    """No server computed a task within its deadline, and it was not to be computed at home."""

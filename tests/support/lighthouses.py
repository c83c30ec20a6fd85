"""A lighthouse of torchft in this process."""

from contextlib import contextmanager

import pytest


@contextmanager
def lighthouse(members):
    """Yield the address of a lighthouse whose groups have at least this many members."""
    coordination = pytest.importorskip("torchft.coordination")  # torchft has wheels only for x86-64
    server = coordination.LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=members,
        join_timeout_ms=60_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=2000,
    )
    try:
        yield server.address()
    finally:
        server.shutdown()

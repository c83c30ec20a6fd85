"""Requests that are damaged at random, and a server that is told to take some of them."""

import pytest

from seqpar.servers.server.caches import Caches
from seqpar.servers.wire.payload import Payload
from tests.support.servers import running
from tests.tools.fuzz_protocol import LIMITS, fuzz


@pytest.fixture
def send(tmp_path):
    """Send so many requests to a server in this process."""
    with running(f"ipc://{tmp_path}/s", limits=LIMITS) as server:
        yield lambda count: fuzz(0, range(count), server.address, tmp_path / "canary")


@pytest.mark.exhaustive
def test_damaged_requests_are_refused(send):
    counts = send(1500)
    assert counts["refused"] > 1000 and counts["right"] > 150


def test_a_server_that_compares_no_checksums_is_found(send, monkeypatch):
    monkeypatch.setattr(Payload, "check", lambda self, buffers, expected: self.check_sizes(buffers))
    with pytest.raises(AssertionError, match="a wrong payload was taken"):
        send(1500)


def test_a_refused_step_that_changes_its_cache_is_found(send, monkeypatch):
    admit = Caches.admit

    def admits(self, client, task, step, buffers):
        if client.session:  # the model has none
            own = self._caches.get(client, {}).get(step.cache)
            if own is not None and own.writes != step.writes:
                own.writes += 1
        return admit(self, client, task, step, buffers)

    monkeypatch.setattr(Caches, "admit", admits)
    with pytest.raises(AssertionError, match="a right request was refused"):
        send(1500)

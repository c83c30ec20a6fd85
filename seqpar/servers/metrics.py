"""What a server counts, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from seqpar.servers.protocol import Status

_COUNTERS = {
    "tasks": "tasks computed",
    "tokens": "query rows of these tasks",
    "bytes": "bytes of their payloads and results",
    "refused": "requests refused, malformed or met by a full server",
    "batches": "fused calls",
    "busy_seconds": "seconds of computing",
}
_GAUGES = {
    "clients": "clients with a lease",
    "waiting": "tasks that wait",
    "caches": "caches of keys and values",
    "cache_bytes": "bytes that these take",
    "draining": "whether the server is about to leave",
    "seconds": "seconds since the server's start",
}


class _Counts(Collector):
    """Reads the counts when they are asked for, so that counting costs nothing else."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        status = self._status()
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"seqpar_{name}", text, value=float(getattr(status, name)))
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"seqpar_{name}", text, value=float(getattr(status, name)))


def publish(status: Callable[[], Status], port: int, host: str) -> None:
    """Serve the metrics over HTTP, in a thread of its own; a ValueError says why it cannot."""
    registry = CollectorRegistry()
    registry.register(_Counts(status))
    try:
        start_http_server(port, host, registry)
    except OSError as error:
        reason = f"{host}:{port} cannot be served at: {error.strerror}"
        raise ValueError(f"metrics: {reason}") from None

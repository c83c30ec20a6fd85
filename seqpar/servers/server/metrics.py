"""What a server counts, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from seqpar.core.web import BoundedServer, Handler, serve_in_thread
from seqpar.servers.wire.protocol import Status

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


def publish(status: Callable[[], Status], port: int, host: str) -> Callable[[], None]:
    """Serve the metrics over HTTP, in a thread; return what ends it.

    A ValueError says why that is not possible.
    """
    registry = CollectorRegistry()
    registry.register(_Counts(status))

    class Page(Handler):
        def do_GET(self) -> None:
            """Answer with all metrics, whatever the path."""
            data = generate_latest(registry)
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    try:
        return serve_in_thread(BoundedServer((host, port), Page))
    except OSError as error:
        reason = f"{host}:{port} cannot be served at: {error.strerror}"
        raise ValueError(f"metrics: {reason}") from None

"""Serves the metrics page: a server's numbers, in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from seqpar.core.web import BoundedServer, Handler, serve_in_thread
from seqpar.servers.server.counters import COUNTERS, Status


class _StatusCollector(Collector):
    """Asks for the status only when somebody reads the page."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        for counter in COUNTERS:
            kind = CounterMetricFamily if counter.grows else GaugeMetricFamily
            value = float(getattr(status, counter.name))
            yield kind(f"seqpar_{counter.name}", counter.help, value=value)


def publish(status: Callable[[], Status], host: str, port: int) -> Callable[[], None]:
    """Serve the metrics page from a thread, and return a function that ends the thread.

    Raises:
        ValueError: the port cannot be bound.
    """
    registry = CollectorRegistry()
    registry.register(_StatusCollector(status))

    class Page(Handler):
        def do_GET(self) -> None:
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

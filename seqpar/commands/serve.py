"""Run an attention server."""

from __future__ import annotations

import argparse
import contextlib
import logging
import resource
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from seqpar.core.arguments import as_int, shown
from seqpar.servers.wire.limits import Limits

if TYPE_CHECKING:
    from seqpar.servers.server.server import Server

# The most time by which a computing thread delays the reading thread.
_THREAD_SWITCH_SECONDS = 0.0005
_MAX_THREADS = 4096
_LOG_SECONDS = 60.0  # the time between lines of a log, where lines cannot be overwritten


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bind", required=True, help="ipc:///FOLDER/NAME or tcp://HOST:PORT (* is any)"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--max-tokens", type=int, help="the most rows in a request")
    parser.add_argument("--max-bytes", type=int, help="the most bytes in a request")
    parser.add_argument(
        "--cache-bytes", type=int, help="the most bytes of all clients' keys and values"
    )
    parser.add_argument("--keys", type=Path, help="the folder of keys; see keygen")
    parser.add_argument(
        "--transports", nargs="+", choices=["grpc", "nixl"], help="transports to offer to clients"
    )
    parser.add_argument(
        "--metrics",
        metavar="[HOST:]PORT",
        help="where to serve Prometheus metrics; default host: 127.0.0.1",
    )
    parser.add_argument(
        "--health",
        metavar="[HOST:]PORT",
        help="where to serve gRPC's health service alone, without TLS; default host: 127.0.0.1",
    )
    parser.add_argument("--threads", type=int, help="threads that compute on a CPU")


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT, then answer the remaining requests."""
    # The imports need the extra "serve", and `--help` must work without it.
    from seqpar.servers.server.server import Server
    from seqpar.servers.transport.certificates import ServerIdentity

    if arguments.threads is not None:
        torch.set_num_threads(as_int("threads", arguments.threads, 1, _MAX_THREADS))
    if arguments.device.partition(":")[0] == "meta":
        raise ValueError("device must be a CPU or GPU, which compute, got 'meta'")
    place = None if arguments.metrics is None else _place("metrics", arguments.metrics)
    health = None if arguments.health is None else _place("health", arguments.health)
    if place is not None:
        try:
            from seqpar.servers.server.metrics import publish
        except ImportError as error:
            how = "pip install 'seqpar[serve]'"
            raise ImportError(f"metrics need {error.name}: {how}") from error
    # The limit is raised, because each connection is an open file.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    caps = {
        "tokens": arguments.max_tokens,
        "bytes": arguments.max_bytes,
        "cache_bytes": arguments.cache_bytes,
    }
    server = Server(
        arguments.bind,
        device=arguments.device,
        limits=Limits(**{name: cap for name, cap in caps.items() if cap is not None}),
        keys=None if arguments.keys is None else ServerIdentity(arguments.keys),
        transports=arguments.transports,
        health=health,
    )
    if place is not None:
        try:
            publish(server.status, *place)
        except ValueError:
            server.stop()
            server.run()  # only frees the sockets, because the server has already stopped
            raise
    print(f"serving at {server.address} on {server.device}", flush=True)
    if server.direct is not None:
        opened = ", ".join(server.direct.addresses) or "no address"
        print(f"NIXL listens at {opened}; whoever connects is not authenticated", flush=True)
    serve(server, LiveLine(server))
    return 0


def _place(name: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 2**16):
        raise ValueError(f"{name} must be PORT or HOST:PORT, got {shown(text)}")
    return host.strip("[]") or "127.0.0.1", int(port)


def serve(server: Server, line: LiveLine | None = None) -> None:
    """Run a server until SIGTERM or SIGINT. A second SIGINT ends the process at once."""

    def end(number: int, frame: object) -> None:
        server.stop()
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)

    # gRPC would log a traceback for each client that leaves while the server writes to it.
    logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
    sys.setswitchinterval(_THREAD_SWITCH_SECONDS)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    server.run(line)


class LiveLine:
    """Prints a server's load, every second on a terminal and otherwise once per minute."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._live = sys.stderr.isatty()
        self._last, self._time = server.status(), time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._time < (1.0 if self._live else _LOG_SECONDS):
            return
        from seqpar.servers.server.counters import live_line

        status = self._server.status()
        text = live_line(status, self._last)
        with contextlib.suppress(OSError):  # raised if stderr was closed
            start, end = ("\r\x1b[K", "") if self._live else ("", "\n")
            print(f"{start}{text}", end=end, file=sys.stderr, flush=True)
        self._last, self._time = status, now

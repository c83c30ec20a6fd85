"""Run an attention server."""

from __future__ import annotations

import argparse
import contextlib
import resource
import signal
import sys
import time
from pathlib import Path

import torch

from seqpar.core.arguments import as_int, shown
from seqpar.servers.server.counters import live_line
from seqpar.servers.server.server import Server
from seqpar.servers.transport.curve_keys import server_keys
from seqpar.servers.wire.limits import Limits

_THREAD_SWITCH_SECONDS = 0.0005  # a computing thread delays the reading thread by at most this
_MAX_THREADS = 4096
_LOG_SECONDS = 60.0  # between lines of a log, where a line cannot be overwritten


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bind", required=True, help="ipc:///PATH or tcp://HOST:PORT (* is any)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--max-tokens", type=int, help="the most rows in a request")
    parser.add_argument("--max-bytes", type=int, help="the most bytes in a request")
    parser.add_argument(
        "--cache-bytes", type=int, help="the most bytes of all clients' keys and values"
    )
    parser.add_argument("--keys", type=Path, help="the folder of keys; see keygen")
    parser.add_argument(
        "--transports", nargs="+", choices=["zmq", "nixl"], help="transports to offer to clients"
    )
    parser.add_argument(
        "--metrics",
        metavar="[HOST:]PORT",
        help="where to serve Prometheus metrics; default host: 127.0.0.1",
    )
    parser.add_argument("--threads", type=int, help="threads that compute on a CPU")


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT, then answer the remaining requests."""
    if arguments.threads is not None:
        torch.set_num_threads(as_int("threads", arguments.threads, 1, _MAX_THREADS))
    if arguments.device.partition(":")[0] == "meta":
        raise ValueError("device must be one that computes, got 'meta'")
    place = None if arguments.metrics is None else _place(arguments.metrics)
    if place is not None:
        try:
            from seqpar.servers.server.metrics import publish
        except ImportError as error:
            how = "pip install 'seqpar[serve]'"
            raise ImportError(f"metrics need {error.name}: {how}") from error
    caps = {
        "tokens": arguments.max_tokens,
        "bytes": arguments.max_bytes,
        "cache_bytes": arguments.cache_bytes,
    }
    server = Server(
        arguments.bind,
        device=arguments.device,
        limits=Limits(**{name: cap for name, cap in caps.items() if cap is not None}),
        keys=None if arguments.keys is None else server_keys(arguments.keys),
        transports=arguments.transports,
    )
    if place is not None:
        try:
            publish(server.status, *place)
        except ValueError:
            server.stop()
            server.run()  # a stopped server only frees its sockets
            raise
    print(f"serving at {server.address} on {server.device}", flush=True)
    serve(server, LiveLine(server))
    return 0


def _place(text: str) -> tuple[int, str]:
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 2**16):
        raise ValueError(f"metrics must be PORT or HOST:PORT, got {shown(text)}")
    return int(port), host.strip("[]") or "127.0.0.1"


def serve(server: Server, line: LiveLine | None = None) -> None:
    """Run a server until SIGTERM or SIGINT; a second SIGINT ends the process immediately.

    Connections count as open files, so the limit of open files is first raised as far as allowed.
    """

    def end(number: int, frame: object) -> None:
        server.stop()
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)

    sys.setswitchinterval(_THREAD_SWITCH_SECONDS)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    server.run(line)


class LiveLine:
    """Prints a server's load: each second on a terminal, otherwise once per minute."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._live = sys.stderr.isatty()
        self._last, self._time = server.status(), time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._time < (1.0 if self._live else _LOG_SECONDS):
            return
        status = self._server.status()
        text = live_line(status, self._last)
        with contextlib.suppress(OSError):  # stderr was closed
            start, end = ("\r\x1b[K", "") if self._live else ("", "\n")
            print(f"{start}{text}", end=end, file=sys.stderr, flush=True)
        self._last, self._time = status, now

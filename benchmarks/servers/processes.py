"""Processes of attention servers and their peers, and tasks for servers."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import torch

from seqpar import Layout
from seqpar.__main__ import main
from seqpar.layout.masks.mask import Mask, slices_between
from seqpar.servers.pool.pool import ServerPool
from seqpar.servers.server.compute import compute
from seqpar.servers.server.counters import Status
from seqpar.servers.status_client import StatusError, ask
from seqpar.servers.wire.request import Request
from seqpar.softmax.compute.call_options import CallOptions

PROCESSES = multiprocessing.get_context("forkserver")  # its imports happen once for all processes
PROCESSES.set_forkserver_preload([__name__])
LIMIT = 60.0  # seconds to wait for fast actions
HEADS, KV_HEADS, DIM, DTYPE = 8, 2, 64, torch.bfloat16


class Peer:
    """A process that runs `function(pipe, *arguments)`, and is killed at the end."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        self.pipe, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(
            target=_run, args=(function, theirs, *arguments), daemon=True
        )
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        if not self.pipe.poll(LIMIT):
            raise TimeoutError("a process does not answer")
        return self.pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid or 0, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()


class Server(Peer):
    """The process of `python -m seqpar serve`, with one computing thread.

    Attributes:
        address: its address.
    """

    def __init__(
        self,
        address: str,
        transport: str,
        change: Callable[[Any], None] | None = None,
        keys: Path | None = None,
    ) -> None:
        """Start the server, with the keys in a folder if one is given.

        `change`, a function of a pipe to this process, can first patch the server's process.
        """
        super().__init__(_serve, address, transport, change, keys)
        self.address = address

    def wait(self, keys: Path | None = None) -> None:
        """Wait until the server answers."""
        end = time.monotonic() + LIMIT
        while True:
            try:
                self.status(keys)
                return
            except StatusError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def status(self, keys: Path | None = None) -> Status:
        """Return the server's status. `keys` is a client's folder of keys."""
        return ask(self.address, keys, LIMIT)


def _run(function: Callable[..., None], pipe: Any, *arguments: Any) -> None:
    torch.set_num_threads(1)
    function(pipe, *arguments)


def _serve(
    pipe: Any,
    address: str,
    transport: str,
    change: Callable[[Any], None] | None,
    keys: Path | None,
) -> None:
    if change is not None:
        change(pipe)
    with (
        open(os.devnull, "w") as nothing,
        contextlib.redirect_stdout(nothing),
        contextlib.redirect_stderr(nothing),
    ):
        secured = [] if keys is None else ["--keys", str(keys)]
        main(["serve", "--bind", address, "--threads", "1", "--transports", transport, *secured])


@contextmanager
def folder() -> Iterator[str]:
    """Yield a folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="seqpar-") as found:
        yield found


@contextmanager
def servers(
    transport: str, changes: Sequence[Callable[[Any], None] | None] = (None,)
) -> Iterator[list[Server]]:
    """Yield ready servers, one for each of the changes."""
    with folder() as sockets, ExitStack() as stack:
        found = [
            stack.enter_context(Server(f"ipc://{sockets}/{i}", transport, change))
            for i, change in enumerate(changes)
        ]
        for server in found:
            server.wait()
        yield found


def connect(addresses: Sequence[str], transport: str, **options: Any) -> ServerPool:
    """Return a pool that is connected to all servers by this transport."""
    pool = ServerPool.connect(addresses, transports=[transport], home=False, **options)
    end = time.monotonic() + LIMIT
    while not all(x.transport == transport for x in pool.report().servers[:-1]):
        if time.monotonic() > end:
            raise SystemExit(f"no {transport} to all servers:\n{pool.report()}")
        time.sleep(0.01)
    return pool


def task(tokens: int, seed: int = 0) -> Request:
    """Return causal attention of one document as one task."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, tokens, heads, DIM, generator=random).to(DTYPE)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    geometry = Layout.contiguous(tokens, 1).geometry
    mask = Mask.of(True, (-1, -1), None, geometry)
    slices = slices_between(geometry, 0, geometry, 0, mask)
    return Request(q, k, v, slices, CallOptions(DIM**-0.5, 0.0, "default", True))


def check(pool: ServerPool, requests: Sequence[Request]) -> None:
    """Exit if an answer has different bits than this process's result."""
    futures = [pool.submit(request) for request in requests]
    for request, future in zip(requests, futures, strict=True):
        expected = compute([request], request.q.device)[0]
        if not all(map(torch.equal, future.result(LIMIT), expected)):
            raise SystemExit("an answer is wrong: no times were measured")

"""Many attention servers as one: what users connect to, and what strategies submit tasks to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

from seqpar.comm.messages.exchange import Comm
from seqpar.core.arguments import as_bool, as_float, as_int, as_path, shown
from seqpar.servers.pool.report import PoolReport
from seqpar.servers.wire.errors import ServersError
from seqpar.servers.wire.limits import Deadlines
from seqpar.servers.wire.request import Request

if TYPE_CHECKING:
    from seqpar.servers.pool.discovery import Discovery
    from seqpar.servers.pool.dispatcher import Dispatcher

_numbers = count(1)  # of this process's pools


class _Alone(Comm):
    """A trainer as the only rank of a group."""

    @property
    def process_group(self) -> NoReturn:
        raise TypeError("a ServerPool is no process group: attention on it cannot be pickled")


class ServerPool:
    """Attention servers that compute tasks, whichever of them are there.

    Made by `connect`. Servers may die, hang, slow down, leave and join: a task goes to another
    server, or is computed in this process where none is left, and has the same result, bit for bit,
    if they compute on the same hardware, on a CPU with the same number of threads. Close it, or use
    it as a context.

    Attributes:
        comm: this process, which is home of all of its tokens, as the only rank of a group.
    """

    def __init__(self, dispatcher: Dispatcher, discovery: Discovery) -> None:
        self._dispatcher, self._discovery = dispatcher, discovery
        self._name, self._process = f"pool {next(_numbers)}", os.getpid()
        self.comm: Comm = _Alone(self._name, 0, 1)

    @classmethod
    def connect(
        cls,
        addresses: str | Sequence[str],
        *,
        keys: str | Path | None = None,
        transports: Sequence[str] | None = None,
        deadlines: Mapping[str, float] | None = None,
        hedge_quantile: float = 0.95,
        depth: int = 4,
        home: bool = True,
        home_depth: int = 1,
        sample: int = 0,
    ) -> ServerPool:
        """Connect to servers, and wait until one is ready, or the deadline of connecting is over.

        Args:
            addresses: of the servers, each ipc://PATH or tcp://HOST:PORT, or one that stands for
                many: file://PATH of a file that has an address a line, or dns://NAME:PORT of a name
                with many addresses. Both are looked at again every few seconds.
            keys: the folder with this client's keys, which addresses elsewhere than on this machine
                need.
            transports: of payloads, the preferred one first; a server chooses among those it has.
                "zmq" is always there. "nixl" needs its package and trusts its peers; by default it
                is offered over Unix sockets alone.
            deadlines: seconds, by the names of `seqpar.servers.wire.limits.Deadlines`, as
                {"request": 10}; the others keep their defaults, and all must be in order.
            hedge_quantile: a task that takes half as long again as this share of all tasks goes to
                a second server, and the first answer counts.
            depth: how many tasks a server has at once.
            home: whether tasks that no server computes are computed in this process; else their
                futures raise a ServersError.
            home_depth: how many tasks this process has at once while servers are there, of those
                that it has done sooner than any of them. 0: it computes just what no server does.
            sample: how many rows of each server's result are computed again in this process. A
                server whose answer is wrong is used no more.

        Raises:
            ValueError: an argument is wrong; it is named.
            ImportError: the packages of the extra `serve` are not installed.
        """
        quantile = as_float("hedge_quantile", hedge_quantile)
        if not 0 < quantile <= 1:
            raise ValueError(f"hedge_quantile must be above 0, and at most 1, got {quantile}")
        depth = as_int("depth", depth, 1, 1024)
        sample, home_depth = as_int("sample", sample, 0), as_int("home_depth", home_depth, 0, 1024)
        at_home = home_depth if as_bool("home", home) else -1
        folder = None if keys is None else as_path("keys", keys)
        try:
            within = Deadlines(**(deadlines or {}))
        except TypeError:
            known = [field.name for field in fields(Deadlines)]
            raise ValueError(f"deadlines must be among {known}, got {shown(deadlines)}") from None
        try:
            from seqpar.servers.pool.connecting import connect
        except ImportError as error:
            how = "pip install 'seqpar[serve]'"
            raise ImportError(f"attention servers need {error.name}: {how}") from error
        return cls(
            *connect(addresses, folder, transports, within, quantile, depth, at_home, sample)
        )

    def submit(self, request: Request) -> Future[tuple[Tensor, ...]]:
        """Have a task computed; return its result's future.

        The result is (out, lse) of a forward, (dq, dk, dv) of a backward, on the request's device.
        Its tensors must not change before the future is done. The future raises a ServersError if
        the deadline is over, and what computing raised at home. A wrong argument raises a
        ValueError that names it.
        """
        if not isinstance(request, Request):
            raise ValueError(f"request must be a Request, got {shown(request)}")
        return self.dispatcher().submit(request)

    def dispatcher(self) -> Dispatcher:
        """Return what has tasks computed, for what is built on it; in this process alone."""
        if os.getpid() != self._process:
            raise ServersError("the pool is another process's: connect in this one")
        return self._dispatcher

    def report(self) -> PoolReport:
        """Return where tasks were computed since the pool was made; printed, it is a table."""
        return self._dispatcher.report()

    def close(self) -> None:
        """Leave all servers. The futures of tasks without a result raise."""
        self._discovery.end()
        self._dispatcher.close()

    def __repr__(self) -> str:
        return f"<ServerPool: {self._name}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ServerPool cannot be pickled: connect in the process that uses it")

    def __deepcopy__(self, memo: object) -> ServerPool:
        return self  # a module that is copied uses the same servers

    def __enter__(self) -> ServerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

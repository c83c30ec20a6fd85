"""`ServerPool`, the public class that connects a process to attention servers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

from seqpar.comm.messages.comm import Comm
from seqpar.core.arguments import as_bool, as_float, as_int, as_path, shown
from seqpar.core.compiling import outside_graphs
from seqpar.servers.pool.report import PoolReport
from seqpar.servers.wire.limits import Deadlines, PoolOptions
from seqpar.servers.wire.request import Request, ServersError

if TYPE_CHECKING:
    from seqpar.servers.pool.dispatcher import Dispatcher

_pool_numbers = count(1)


class _OnlyRank(Comm):
    @property
    def process_group(self) -> NoReturn:
        raise TypeError("a ServerPool is no process group: attention on it cannot be pickled")


class ServerPool:
    """Attention servers that compute tasks for this process. A task is a part of an attention call.
    Make a pool with `connect`.

    Servers can die, hang, slow down, leave and join at any time. If a server does not compute a
    task, the pool sends the task to another server. If no server can compute the task, this process
    computes it. The result has the same bits if the servers and this process have the same hardware
    and, on CPUs, the same number of threads. Close the pool, or use the pool as a context.

    Attributes:
        comm: a group in which this process is the only rank and stores all tokens.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._name, self._process = f"pool {next(_pool_numbers)}", os.getpid()
        self.comm: Comm = _OnlyRank(self._name, 0, 1)

    @classmethod
    @outside_graphs
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
        """Connect to servers, and wait until a server is ready.

        The wait ends at the deadline `connect`. If no server is ready by this deadline, the pool is
        returned nevertheless, and continues to connect.

        Args:
            addresses: one address or several. ipc://PATH and tcp://HOST:PORT are each the address
                of one server. file://PATH is a file with one address per line, and dns://NAME:PORT
                is a name in DNS. The pool looks up files and names again every 2 s, so that servers
                can join and leave.
            keys: the folder with this client's certificate and private key, which `python -m seqpar
                keygen` makes. The argument is required for servers on other machines.
            transports: the names of the transports for payloads. With ["nixl"], payloads are sent
                by NIXL to servers that offer NIXL, and by gRPC to all others. By default only gRPC
                is used. NIXL needs the extra `nixl`, does not authenticate its peers, and opens TCP
                ports that anyone can use, even if all servers are on Unix sockets. Use NIXL only on
                networks and machines that you trust.
            deadlines: a dictionary from the names of deadlines to seconds, such as {"request": 10}.
                The class `seqpar.servers.wire.limits.Deadlines` lists the names, the defaults and
                the order in which deadlines must ascend.
            hedge_quantile: a number above 0 and at most 1. A task that takes more than 1.5 times as
                long as this quantile of recent tasks is also sent to a second server, and the first
                answer counts.
            depth: the largest number of tasks that one server has at a time.
            home: whether this process computes tasks that no server computes. If False, the futures
                of such tasks raise a ServersError.
            home_depth: the largest number of tasks that this process has at a time while servers
                are ready. This process takes a task if it should finish the task earlier than any
                server. With 0, this process computes only tasks that no server computes.
            sample: the number of rows of each server's result that this process computes again. A
                server whose answer is wrong is never used again. With 0, results are not checked.

        Raises:
            ValueError: if an argument is wrong. The message names the argument.
            ImportError: if the packages of the extra `serve` are not installed.
        """
        quantile = as_float("hedge_quantile", hedge_quantile)
        if not 0 < quantile <= 1:
            raise ValueError(f"hedge_quantile must be above 0, and at most 1, got {quantile}")
        depth = as_int("depth", depth, 1, 1024)
        sample, home_depth = as_int("sample", sample, 0), as_int("home_depth", home_depth, 0, 1024)
        has_home = as_bool("home", home)
        folder = None if keys is None else as_path("keys", keys)
        try:
            within = Deadlines() if deadlines is None else Deadlines(**deadlines)
        except TypeError:
            known = [field.name for field in fields(Deadlines)]
            given = shown(deadlines)
            raise ValueError(f"deadlines must have names among {known}, got {given}") from None
        options = PoolOptions(
            within, quantile, depth, has_home, home_depth if has_home else 0, sample
        )
        try:
            from seqpar.servers.pool.dispatcher import start_dispatcher
        except ImportError as error:
            how = "pip install 'seqpar[serve]'"
            raise ImportError(f"attention servers need {error.name}: {how}") from error
        return cls(start_dispatcher(addresses, folder, transports, options))

    def submit(self, request: Request) -> Future[tuple[Tensor, ...]]:
        """Submit a task, and return the future of its result.

        The result is (out, lse) of a forward pass or (dq, dk, dv) of a backward pass, on the
        request's device. Do not change the request's tensors before the future is done. The future
        raises a ServersError if there is no result by the deadline `give_up`. If this process
        computes the task and fails, the future raises the error of that computation. Callbacks of
        the future must not wait, because they run in the one thread that serves all pools of this
        process.

        Raises:
            ValueError: if `request` is not a Request.
        """
        if not isinstance(request, Request):
            raise ValueError(f"request must be a Request, got {shown(request)}")
        return self.dispatcher().submit(request)

    def dispatcher(self) -> Dispatcher:
        """Return the object that sends tasks. Raises a ServersError in a forked process."""
        if os.getpid() != self._process:
            raise ServersError("the pool was made by a different process: call connect in this one")
        return self._dispatcher

    def report(self) -> PoolReport:
        """Return a report of where tasks were computed so far. The report prints as a table."""
        return self._dispatcher.report()

    def close(self) -> None:
        """End the sessions on all servers. The futures of tasks without a result raise a
        ServersError.

        In a forked process, `close` does nothing, because the pool belongs to the parent process.
        """
        if os.getpid() == self._process:
            self._dispatcher.close()

    def __repr__(self) -> str:
        return f"<ServerPool: {self._name}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ServerPool cannot be pickled: connect in the process that uses it")

    def __deepcopy__(self, memo: object) -> ServerPool:
        return self  # copies of a module use the same servers

    def __enter__(self) -> ServerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

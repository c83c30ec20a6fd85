"""An attention server. The event loop's thread sends and receives, and other threads compute."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait

import grpc
import torch

from seqpar.core.arguments import to_device
from seqpar.servers.server.callers import Callers
from seqpar.servers.server.counters import Status
from seqpar.servers.server.health import Health, Place
from seqpar.servers.server.service import BEAT_SECONDS, MAX_CALLS, Service
from seqpar.servers.transport.addresses import (
    bind_target,
    bound,
    check_address,
    check_keys,
    is_own,
    path_of,
)
from seqpar.servers.transport.certificates import ServerIdentity
from seqpar.servers.transport.choose import own_name, transports_of
from seqpar.servers.transport.event_loop import event_loop, start
from seqpar.servers.transport.loopback import sole_server
from seqpar.servers.transport.one_sided import OneSided
from seqpar.servers.transport.options import server_options
from seqpar.servers.transport.unix_sockets import binding
from seqpar.servers.wire import versions
from seqpar.servers.wire.limits import Limits, ServerDeadlines


class Server:
    """Serves requests at an address until it is stopped."""

    def __init__(
        self,
        address: str,  # ipc://PATH, or tcp://HOST:PORT; the port * stands for any free port
        *,
        device: torch.device | str = "cpu",
        limits: Limits | None = None,
        deadlines: ServerDeadlines | None = None,
        keys: ServerIdentity | None = None,  # required unless the address is local
        # By default, the server uses only gRPC. NIXL trusts its peers, does not encrypt, and opens
        # a port that anyone may use.
        transports: Sequence[str] | None = None,
        # The address of a second port for the health service, without TLS.
        health: Place | None = None,
    ) -> None:
        check_keys("address", check_address("address", address), keys)
        self.device = to_device(torch.empty(0), device).device
        self.limits = limits or Limits()
        self.deadlines = deadlines or ServerDeadlines()
        self.direct: OneSided | None = None
        if "nixl" in transports_of(transports):
            self.direct = OneSided(f"seqpar-{own_name()}")
        self._keys, self._callers = keys, Callers(keys)
        self._service = Service(
            self.device, self.limits, self.deadlines, self._callers, self.direct
        )
        self.worker, self.totals = self._service.worker, self._service.totals
        self._held = contextlib.ExitStack()  # locks that keep other servers from the address
        self._callers.address = self.address = start(self._bind(address, health)).result()

    async def _bind(self, address: str, health: Place | None) -> str:
        """Bind the address, and return the address with its port. The server does not answer
        yet.
        """
        self._health = Health(health)
        options = server_options(self.deadlines, shares_port=self._keys is None)
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=2 * MAX_CALLS)
        handlers = [self._service.handlers(version) for version in versions.VERSIONS]
        self._server.add_generic_rpc_handlers(tuple(handlers))
        self._health.add_to(self._server, self._service.admit)
        try:
            return self._bind_port(address)
        except RuntimeError:  # gRPC's message does not give a reason
            self._held.close()
            why = "it is in use, or not an address of this machine"
            raise ValueError(f"address: {address} cannot be bound: {why}") from None
        except OSError as error:
            self._held.close()
            raise ValueError(f"address: {address} cannot be bound: {error}") from None

    def _bind_port(self, address: str) -> str:
        if is_own(address):
            with binding(path_of(address)) as lock:
                self._add_port(address)
            self._held.callback(lock.free)
            return address
        own = bound(address, self._add_port(address))
        if self._keys is None:
            self._held.enter_context(sole_server(own))
        return own

    def _add_port(self, address: str) -> int:
        if self._keys is None:
            port: int = self._server.add_insecure_port(bind_target(address))
        else:
            port = self._server.add_secure_port(bind_target(address), self._keys.credentials())
        return port

    @property
    def draining(self) -> bool:
        """Whether the server answers its accepted requests, but accepts no further requests."""
        return self._service.draining

    def stop(self) -> None:
        """Accept no further requests.

        `run` returns when all accepted requests are answered, but at the latest after the deadline
        `drain`.
        """
        self._service.draining = True
        event_loop().call_soon_threadsafe(self._service.tell)

    def status(self) -> Status:
        return self._service.status()

    def run(self, each_beat: Callable[[], None] | None = None) -> None:
        """Serve until `stop` is called. The function `each_beat` is called several times per
        second.
        """
        running = start(self._run(each_beat))
        try:
            while not wait([running], BEAT_SECONDS).done:
                pass  # the main thread handles signals between two waits
            running.result()
        finally:
            running.cancel()
            self._held.close()
            self._service.close()

    async def _run(self, each_beat: Callable[[], None] | None) -> None:
        self.worker.start()
        await self._server.start()
        await self._health.begin()
        try:
            while not self.draining:
                self._beat()
                if each_beat is not None:
                    each_beat()
                await self._service.wait_for_beat()
            await self._health.drain()
            self._service.tell()
            leave_by = time.monotonic() + self.deadlines.drain
            while any(x.requests for x in self._service.sessions) and time.monotonic() < leave_by:
                await asyncio.sleep(0.01)
        finally:
            await self._server.stop(grace=0.1)
            await self._health.end()

    def _beat(self) -> None:
        if not self.worker.is_alive():
            raise RuntimeError("the compute thread has ended")
        if self._keys is not None:
            for fault in self._keys.look():
                self._service.audit.write(logging.WARNING, "keys", "", "", fault)
            self._service.end_untrusted()

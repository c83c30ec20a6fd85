"""gRPC's standard health service, which tells whether a server accepts requests.

The health service answers at the server's address. The probes of Kubernetes support neither TLS nor
certificates, so they cannot call a server that has certificates. For such probes, a second port can
offer the health service without TLS.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio

from seqpar.servers.transport.addresses import joined
from seqpar.servers.wire import versions

Place = tuple[str, int]  # a host and a port
# Takes a call's context; returns if the call is allowed, and otherwise refuses it.
Admit = Callable[[Any], Awaitable[None]]
_MAX_CALLS = 64  # the most calls at a time at the second port
_OPTIONS = [  # the options of the second port, which anybody may call
    ("grpc.max_receive_message_length", 2**10),
    ("grpc.max_metadata_size", 2**13),
    ("grpc.max_concurrent_streams", 8),
    ("grpc.max_allowed_incoming_connections", _MAX_CALLS),
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_connection_age_ms", 10_000),  # otherwise a call `Watch` could last forever
    ("grpc.max_connection_age_grace_ms", 1_000),
    ("grpc.so_reuseport", 0),  # otherwise two servers could share the port
]


class _Checked(health_pb2_grpc.HealthServicer):
    """Checks the caller before the health service answers."""

    def __init__(self, servicer: aio.HealthServicer, admit: Admit) -> None:
        self._servicer, self._admit = servicer, admit

    async def Check(self, request: Any, context: Any) -> Any:
        await self._admit(context)
        return await self._servicer.Check(request, context)

    async def Watch(self, request: Any, context: Any) -> None:
        await self._admit(context)
        await self._servicer.Watch(request, context)


class Health:
    """The health of a server, and of each version of its service."""

    def __init__(self, place: Place | None) -> None:
        """Bind the second port at `place`, unless `place` is None.

        Raises:
            ValueError: the port cannot be bound.
        """
        self._servicer = aio.HealthServicer()
        self._second: grpc.aio.Server | None = None
        if place is not None:
            self._second = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=_MAX_CALLS)
            health_pb2_grpc.add_HealthServicer_to_server(self._servicer, self._second)
            name = joined(*place)
            try:
                self._second.add_insecure_port(name)
            except RuntimeError:
                raise ValueError(
                    f"health: {name} cannot be bound; possibly another program uses this port"
                ) from None

    def add_to(self, server: grpc.aio.Server, admit: Admit) -> None:
        checked = _Checked(self._servicer, admit)
        health_pb2_grpc.add_HealthServicer_to_server(checked, server)

    async def begin(self) -> None:
        for service in ("", *(version.service for version in versions.VERSIONS)):
            await self._servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
        if self._second is not None:
            await self._second.start()

    async def drain(self) -> None:
        await self._servicer.enter_graceful_shutdown()

    async def end(self) -> None:
        if self._second is not None:
            await self._second.stop(grace=None)

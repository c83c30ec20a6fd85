"""A request for a server's status. The client needs no session for the request."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import grpc

from seqpar.servers.server.counters import Status
from seqpar.servers.transport.addresses import check_keys, check_peer
from seqpar.servers.transport.certificates import ClientIdentity
from seqpar.servers.transport.options import open_blocking_channel
from seqpar.servers.transport.routes import Route
from seqpar.servers.wire.texts import printable
from seqpar.servers.wire.versions import VERSIONS, Version

_LOOK_SECONDS = 0.1  # the pause between two attempts to reach a server that does not listen yet


class StatusError(RuntimeError):
    """A server did not report its status."""


def ask(address: str, keys: Path | None, timeout: float) -> Status:
    """Return the status of the server at `address`.

    Raises:
        StatusError: the server did not answer within `timeout` seconds, or it answered with an
            error. The text has the reason.
        ValueError: an argument is wrong. The text names the argument.
    """
    identity = None if keys is None else ClientIdentity(keys)
    check_keys("address", check_peer("address", address), identity)
    route = _route(address, identity is not None, timeout)
    with closing(route), open_blocking_channel(route, identity, timeout) as channel:
        for version in VERSIONS:
            try:
                return _ask(channel, version, timeout)
            except grpc.RpcError as error:
                last = version is VERSIONS[-1]
                if last or error.code() != grpc.StatusCode.UNIMPLEMENTED:
                    why = printable(error.details() or error.code().name)
                    reason = f"{address} has not answered within {timeout:g} s: {why}"
                    raise StatusError(reason) from None
    raise AssertionError("unreachable")


def _route(address: str, has_keys: bool, timeout: float) -> Route:
    """Wait at most `timeout` seconds until a server listens, and return a route to the server."""
    end = time.monotonic() + timeout
    while True:
        try:
            return Route(address, has_keys)
        except OSError as error:
            if time.monotonic() > end:
                why = f"{address} has not answered within {timeout:g} s: {error}"
                raise StatusError(why) from None
        time.sleep(_LOOK_SECONDS)


def _ask(channel: grpc.Channel, version: Version, timeout: float) -> Status:
    call = channel.unary_unary(f"/{version.service}/Status")
    request = version.messages.StatusRequest().SerializeToString()
    reply = version.read(version.messages.StatusReply, call(request, timeout=timeout))
    fields = {field.name: getattr(reply, field.name) for field in reply.DESCRIPTOR.fields}
    texts = {name: printable(x) for name, x in fields.items() if isinstance(x, str)}
    transports = [printable(x) for x in reply.transports]
    return Status(**fields | texts | {"transports": transports})

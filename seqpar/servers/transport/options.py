"""The options of gRPC's channels and servers, and functions that open channels."""

from __future__ import annotations

import os
import resource

import grpc

from seqpar.servers.transport.certificates import SERVER_NAME, ClientIdentity
from seqpar.servers.transport.routes import CHANNEL_OPTIONS, Route
from seqpar.servers.wire.limits import MAX_MESSAGE_BYTES, ServerDeadlines

# By default, gRPC prints a line for each failed handshake and for each server that leaves.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# By default, gRPC restarts its threads in a forked process. There, the threads would crash on the
# sockets of the parent's pools.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
Options = list[tuple[str, int | str]]
_MAX_STREAMS = 36  # the most calls at a time on a connection: 32 tasks, and 4 control calls
_UNREAD_BYTES = 2**16
_MAX_METADATA_BYTES = 2**13
_MIN_PING_SECONDS = 1.0  # between a client's pings; a server accepts pings three times as often


def _milliseconds(seconds: float) -> int:
    return max(1, int(1000 * seconds))


def server_options(deadlines: ServerDeadlines, shares_port: bool) -> Options:
    """Return the options of a server.

    `shares_port` says whether a client can bind a socket to the server's port (`hold_port`).

    Each connection is an open file. Connections are limited to three quarters of the files that the
    process can open, so that the server can always open the files that it needs.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        # With these two options, gRPC buffers only 64 KiB of a stream that the server does not
        # read, so that payloads that wait for a turn take little memory. Without them, gRPC buffers
        # more on a fast connection: up to 60 MiB per stream were measured. A message that the
        # server reads is received as a whole in any case.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", _UNREAD_BYTES),
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", 3 * files // 4),
        ("grpc.server_handshake_timeout_ms", _milliseconds(deadlines.handshake)),
        ("grpc.keepalive_time_ms", _milliseconds(deadlines.idle / 2)),
        ("grpc.keepalive_timeout_ms", _milliseconds(deadlines.idle / 2)),
        # Without this option, a connection whose peer does not answer pings ends only after a
        # minute.
        ("grpc.http2.ping_timeout_ms", _milliseconds(deadlines.idle / 2)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _milliseconds(_MIN_PING_SECONDS / 3)),
        ("grpc.so_reuseport", int(shares_port)),
    ]


def client_options(seconds: float) -> Options:
    """Return the options of a channel, which is closed if the server answers no ping for
    `seconds`.
    """
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        *CHANNEL_OPTIONS,
        ("grpc.enable_retries", 0),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.keepalive_time_ms", _milliseconds(max(seconds / 2, _MIN_PING_SECONDS))),
        ("grpc.keepalive_timeout_ms", _milliseconds(seconds / 2)),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.ssl_target_name_override", SERVER_NAME),
        ("grpc.default_authority", SERVER_NAME),
    ]


def open_channel(route: Route, identity: ClientIdentity | None, seconds: float) -> grpc.aio.Channel:
    """Return a channel to a server, with a network connection of its own."""
    options = client_options(seconds)
    if identity is None:
        return grpc.aio.insecure_channel(route.target, options=options)
    return grpc.aio.secure_channel(route.target, identity.credentials(), options=options)


def open_blocking_channel(
    route: Route, identity: ClientIdentity | None, seconds: float
) -> grpc.Channel:
    """Return a channel to a server, whose calls block."""
    options = client_options(seconds)
    if identity is None:
        return grpc.insecure_channel(route.target, options=options)
    return grpc.secure_channel(route.target, identity.credentials(), options=options)

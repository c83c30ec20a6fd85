"""Request a server's status, without a lease."""

from __future__ import annotations

import time
from pathlib import Path

import zmq

from seqpar.servers.transport.addresses import check_keys, check_peer
from seqpar.servers.transport.client_socket import ClientSocket
from seqpar.servers.transport.curve_keys import client_keys
from seqpar.servers.wire import protocol
from seqpar.servers.wire.protocol import Message, ProtocolError, Status

_LOOK = 0.1  # seconds between checks whether a Unix socket exists


def ask(address: str, keys: Path | None, timeout: float) -> Status:
    """Return a server's status.

    Raises a TimeoutError after `timeout` seconds without an answer, a ProtocolError if the answer
    is not a status, and a ValueError that names a wrong argument.
    """
    own = None if keys is None else client_keys(keys)
    check_keys("address", check_peer("address", address), own)
    poller = zmq.Poller()
    with zmq.Context() as context:
        dialled = ClientSocket(context, poller, address, own, timeout)
        try:
            dialled.send([protocol.encode(protocol.StatusRequest())])
            message = _answer(dialled, poller, address, timeout)
        finally:
            dialled.close(0)
    if not isinstance(message, Status):
        raise ProtocolError(f"{address} has not said its status")
    return message


def _answer(dialled: ClientSocket, poller: zmq.Poller, address: str, timeout: float) -> Message:
    """Return the first message; a TimeoutError has the reasons why none arrived, where known."""
    end, reasons = time.monotonic() + timeout, dict[str, None]()
    while (left := end - time.monotonic()) > 0:
        fault = dialled.connect()
        if fault is not None:
            reasons = {fault: None}
        poller.poll(1 + int(min(left, _LOOK) * 1000))
        if (frames := dialled.receive()) is not None:
            return protocol.decode(frames[0])
        if (reason := dialled.broken()) is not None:
            reasons[reason] = None
    why = ": ".join([f"{address} has not answered within {timeout:g} s", *reasons])
    raise TimeoutError(why)

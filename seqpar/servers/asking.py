"""Ask a server how it does, without a lease."""

from __future__ import annotations

from pathlib import Path

import zmq

from seqpar.servers.addresses import check_keys, check_peer
from seqpar.servers.keys import client_keys
from seqpar.servers.protocol import ProtocolError, Status, StatusRequest, decode, encode
from seqpar.servers.sockets import secure


def ask(address: str, keys: Path | None, timeout: float) -> Status:
    """Return a server's status.

    A TimeoutError says that it has not answered in so many seconds, a ProtocolError that what
    answered is no such server, and a ValueError which argument is wrong.
    """
    own = None if keys is None else client_keys(keys)
    check_keys("address", check_peer("address", address), own)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        secure(socket, own)
        socket.connect(address)
        socket.send(encode(StatusRequest()))
        if not socket.poll(int(timeout * 1000)):
            raise TimeoutError(f"{address} has not answered within {timeout:g} s")
        message = decode(socket.recv())
    if not isinstance(message, Status):
        raise ProtocolError(f"{address} has not said its status")
    return message

"""A client's connection by hand, without keys, in ZeroMQ's protocol ZMTP 3.0."""

import contextlib
import socket
import struct

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 32)
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"


@contextlib.contextmanager
def dealer(port, properties=b""):
    """Yield the socket of a DEALER behind the handshake; `properties` are more of READY's.

    It sends nothing before the server is ready too: ZeroMQ may end a connection that does.
    """
    with socket.create_connection(("127.0.0.1", port), 20) as made:
        made.sendall(GREETING)
        _received(made, len(GREETING))
        ready = READY + properties
        made.sendall(bytes([4, len(ready)]) + ready)
        frame(made)
        yield made


def frame(connection):
    """Receive a frame: a message's, or a command's."""
    (flags,) = _received(connection, 1)
    size = _received(connection, 8 if flags & 2 else 1)
    return _received(connection, int.from_bytes(size, "big"))


def _received(connection, size):
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        assert more, "the server ends the connection"
        data += more
    return data

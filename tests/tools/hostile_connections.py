"""Open connections to a server that speak HTTP/2 badly or not at all: none may end the server.

Run it as `python -m tests.tools.hostile_connections`. The connections are plain sockets over TCP
and Unix sockets, without keys or inside TLS with a trusted certificate. Meanwhile, an honest client
submits tasks, and checks every bit of the results. Afterwards, the server must not have more
descriptors than before. After the first third of the connections, its memory must not grow by 64
MiB.
"""

import argparse
import contextlib
import itertools
import random
import socket
import ssl
import struct
import tempfile
import time
from pathlib import Path

from seqpar.servers.transport.addresses import host_and_port, is_own, path_of
from seqpar.servers.transport.authority import add_client, generate
from seqpar.servers.transport.certificates import SERVER_NAME
from seqpar.servers.wire.codec import pack
from seqpar.servers.wire.limits import ServerDeadlines
from seqpar.servers.wire.versions import VERSIONS, joined
from tests.support.faults import LIMIT
from tests.support.requests import random_request
from tests.support.servers import LONG_DEADLINES, ServerProcess, connect, same, usage

_BATCH = 50  # connections that are open together
MOST_GROWTH = 2**26  # bytes of a server's memory; the C library does not return all of it
EVERY_KIND = list(itertools.product(["ipc", "tcp"], [False, True]))
REQUEST = random_request(0, 16, 32)
# While a machine handles a flood, a client may have to wait for seconds.
DEADLINES = ServerDeadlines(idle=6.0, handshake=2.0, transfer=2.0)
SECONDS = 5.0  # the longest time that a connection waits
SERVICE = VERSIONS[0].service

# --- HTTP/2, as far as hostile clients need it ---

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS = 1, 1, 4
NO_ERROR, CANCEL = 0, 8


def frame(kind, flags=0, stream=0, data=b"", size=None):
    """Return a frame. `size` is the length that the frame claims to have."""
    size = len(data) if size is None else size
    return struct.pack(">I", size)[1:] + struct.pack(">BBI", kind, flags, stream) + data


def _text(data):
    """Return a string of HPACK without compression."""
    if len(data) < 127:
        return bytes([len(data)]) + data
    size, found = len(data) - 127, bytearray([127])
    while size > 127:
        found.append(size & 127 | 128)
        size >>= 7
    return bytes([*found, size]) + data


def fields(**more):
    """Return the header block of a call of Compute, with more or different fields."""
    of_call = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/{SERVICE}/Compute",
        ":authority": SERVER_NAME,
        "te": "trailers",  # codespell:ignore te
        "content-type": "application/grpc",
    } | more
    return b"".join(b"\0" + _text(x.encode()) + _text(y.encode()) for x, y in of_call.items())


def headers(stream, flags=END_HEADERS, **more):
    return frame(HEADERS, flags, stream, fields(**more))


def message(data, stream=1, flags=0, size=None, compressed=0):
    """Return a DATA frame with a message of gRPC. `size` is the length that the message claims."""
    head = struct.pack(">BI", compressed, len(data) if size is None else size)
    return frame(DATA, flags, stream, head + data)


HELLO = PREFACE + frame(SETTINGS) + frame(SETTINGS, ACK)
STREAMS = range(1, 512, 2)
FLOOD = 2000  # frames of a flood
BEGUN = VERSIONS[0].request(pack(REQUEST).header(bytes(16)))


def _setting(number, value):
    return struct.pack(">HI", number, value)


def _noise(seed):
    return random.Random(seed).randbytes(4096)


def _mixed(seed):
    """Return frames of all kinds, flags, streams and sizes."""
    drawn = random.Random(seed)
    frames = [headers(1)]
    for _ in range(50):
        kind, flags, stream = drawn.randrange(12), drawn.randrange(256), drawn.choice([0, 1, 3, 8])
        frames.append(frame(kind, flags, stream, drawn.randbytes(drawn.randrange(40))))
    return HELLO + b"".join(frames)


# Name: what a connection sends, or a function that makes it from a new number.
SENT = {
    "nothing": b"",
    "one byte": b"P",
    "half a preface": PREFACE[:12],
    "a preface alone": PREFACE,
    "HTTP/1": b"GET / HTTP/1.1\r\nHost: attention\r\n\r\n",
    "a hello of TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "ZeroMQ": b"\xff" + bytes(8) + b"\x7f\x03\x00PLAIN" + bytes(47),
    "zeros": bytes(4096),
    "noise": _noise,
    "noise after a preface": lambda seed: PREFACE + _noise(seed),
    "frames at random": _mixed,
    "a flood of PING": HELLO + frame(PING, data=bytes(8)) * FLOOD,
    "a flood of PING answers": HELLO + frame(PING, ACK, data=bytes(8)) * FLOOD,
    "a flood of SETTINGS": HELLO + frame(SETTINGS, data=_setting(4, 2**16)) * FLOOD,
    "a long SETTINGS": HELLO + frame(SETTINGS, data=_setting(4, 2**16) * 2000),
    "windows of frames": HELLO + frame(SETTINGS, data=_setting(4, 0) + _setting(4, 2**31 - 1)),
    "a window too large": HELLO
    + headers(1)
    + frame(WINDOW, stream=1, data=b"\x7f\xff\xff\xff") * 9,
    "a flood of windows": HELLO + frame(WINDOW, data=b"\0\0\0\1") * FLOOD,
    "a flood of PRIORITY": HELLO + frame(PRIORITY, stream=1, data=bytes(5)) * FLOOD,
    "a rapid reset": HELLO
    + b"".join(
        headers(x) + frame(RST_STREAM, stream=x, data=struct.pack(">I", CANCEL)) for x in STREAMS
    ),
    "streams that are opened and abandoned": HELLO + b"".join(map(headers, STREAMS)),
    "more streams than allowed": HELLO + b"".join(headers(x) for x in range(1, 3001, 2)),
    "streams out of order": HELLO + headers(9) + headers(3) + headers(3) + headers(8),
    "a header that does not end": HELLO
    + frame(HEADERS, 0, 1, fields())
    + frame(CONTINUATION, 0, 1, b"\0" + _text(b"a") + _text(b"b" * 9)) * FLOOD,
    "an oversized header": HELLO
    + frame(HEADERS, 0, 1, fields())
    + frame(CONTINUATION, 0, 1, b"\0" + _text(b"a") + _text(b"b" * 16000)) * 20,
    "a header of nothing": HELLO + frame(HEADERS, END_HEADERS, 1, b"\xff" * 64),
    "a table too large": HELLO + frame(HEADERS, END_HEADERS, 1, b"\x3f\xff\xff\xff\xff\x0f"),
    "another content": HELLO + headers(1, **{"content-type": "text/html"}),
    "another method": HELLO + headers(1, **{":path": "/x" * 500}),
    "a compressed message": HELLO
    + headers(1, **{"grpc-encoding": "gzip"})
    + message(b"x", compressed=1),
    "an odd timeout": HELLO + headers(1, **{"grpc-timeout": "99999999999999H"}),
    "a time that is over": HELLO + headers(1, **{"grpc-timeout": "1n"}) + message(BEGUN),
    "DATA without a stream": HELLO + message(b"x", 7),
    "empty DATA": HELLO + headers(1) + frame(DATA, 0, 1) * FLOOD,
    "a message of 4 GiB": HELLO + headers(1) + message(b"x", size=2**32 - 1),
    "a message that does not end": HELLO + headers(1) + message(b"x" * 9000, size=2**21),
    "a flood of messages": HELLO + headers(1) + message(joined(b"", [b"x"])) * FLOOD,
    "a request of another session": HELLO + headers(1) + message(BEGUN, flags=END_STREAM),
    "a frame above the limit": HELLO + headers(1) + frame(DATA, 0, 1, b"x", size=2**24 - 1),
    "half a frame": HELLO + headers(1) + frame(DATA, 0, 1, b"x", size=100),
    "GOAWAY": HELLO + headers(1) + frame(GOAWAY, data=bytes(8)) * 50,
    "PUSH_PROMISE": HELLO + frame(PUSH, END_HEADERS, 1, struct.pack(">I", 2) + fields()),
    "a session that nobody reads": HELLO
    + frame(SETTINGS, data=_setting(4, 0))
    + headers(1, **{":path": f"/{SERVICE}/Session"})
    + message(b"", flags=END_STREAM),
}  # fmt: skip


def connection(address, keys=None):
    """Return a connected socket. `keys` is a folder of keys."""
    found = socket.socket(socket.AF_UNIX if is_own(address) else socket.AF_INET)
    found.settimeout(SECONDS)
    found.connect(path_of(address) if is_own(address) else host_and_port(address))
    return found if keys is None else _secure(found, keys)


def _secure(found, keys):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for authority in (keys / "authorities").iterdir():
        context.load_verify_locations(authority)
    context.load_cert_chain(keys / "client.crt", keys / "client.key")
    context.set_alpn_protocols(["h2"])
    try:
        return context.wrap_socket(found, server_hostname=SERVER_NAME)
    except BaseException:
        found.close()
        raise


def attack(address, keys, name, seed):
    """Open a hostile connection; return it, unless it has already ended itself."""
    data = SENT[name]
    found = connection(address, keys)
    with contextlib.suppress(OSError):  # the server has ended the connection
        found.sendall(data(seed) if callable(data) else data)
        if seed % 3 == 0:
            found.recv(2**16)
        elif seed % 3 == 1:  # a reset of TCP
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            found.close()
    return found


def _batches(numbers):
    for start in range(numbers.start, numbers.stop, _BATCH):
        yield range(start, min(start + _BATCH, numbers.stop))


class Attack:
    """Hostile connections to one server, and an honest client that submits tasks meanwhile.

    If the server has keys, every fourth connection to it has no TLS.

    Attributes:
        answers: how many right answers the honest client has had.
    """

    def __init__(self, server, keys=None, hostile_keys=None):
        self._server, self._keys, self._hostile_keys = server, keys, hostile_keys
        self.answers = 0

    def run(self, numbers, names=tuple(SENT)):
        """Open the connections of these numbers; return the bytes of the server's memory
        afterwards."""
        options = {"keys": self._keys, "home": False, "deadlines": LONG_DEADLINES}
        with connect(self._server.address, **options) as pool:
            self._ask(pool)
            before = usage(self._server.process.pid)
            for batch in _batches(numbers):
                with contextlib.ExitStack() as stack:
                    for i in batch:
                        seed, which = divmod(i, len(names))
                        keys = self._hostile_keys if seed % 4 else None
                        with contextlib.suppress(OSError):  # of a handshake
                            stack.enter_context(
                                attack(self._server.address, keys, names[which], seed)
                            )
                    if self._keys is not None:  # without keys, hostile calls may take its turns
                        self._ask(pool)
                self._ask(pool)
            self._wait_for_end(pool, before)
            assert not pool.report().servers[0].lost, "an honest client's session has ended"
        return self._least_memory()

    def _least_memory(self):
        """Return the bytes of the server's memory after it has freed what a session left."""
        found = []
        for _ in range(10):
            time.sleep(0.1)
            found.append(usage(self._server.process.pid)[2])
        return min(found)

    def _ask(self, pool):
        assert same(pool.submit(REQUEST).result(LIMIT), REQUEST), "a result was wrong"
        self.answers += 1

    def _wait_for_end(self, pool, before):
        """Wait until the server has at most as many descriptors as before."""
        end = time.monotonic() + LIMIT
        while (now := usage(self._server.process.pid))[0] > before[0]:
            assert time.monotonic() < end, f"descriptors remain: {before[0]} before, {now[0]} after"
            time.sleep(0.1)
        self._ask(pool)
        assert self._server.process.is_alive()


def attack_all(count, folder, kinds=EVERY_KIND, say=print):
    """Attack servers: each has a kind of address, and keys or no keys.

    Each server gets `count` // 2 connections, and then `count` connections that must not enlarge
    its memory by `MOST_GROWTH`.
    """
    generate(folder / "keys")
    add_client(folder / "keys", "hostile")
    for kind, secured in kinds:
        address = f"ipc://{folder}/s" if kind == "ipc" else "tcp://127.0.0.1:*"
        keys, hostile_keys = (
            (folder / "keys", folder / "keys" / "clients" / "hostile") if secured else (None, None)
        )
        options = {"keys": keys} if secured else {}
        server = ServerProcess(address, deadlines=DEADLINES, **options)
        try:
            each = Attack(server, keys, hostile_keys)
            first = each.run(range(count // 2))
            second = each.run(range(count // 2, count // 2 + count))
        finally:
            server.end()
        name = f"{kind} {'with' if secured else 'without'} keys"
        memory = f"{first / 2**20:.0f} MiB, then {second / 2**20:.0f} MiB"
        say(f"{name}: {each.answers} right answers; {memory}")
        assert second < first + MOST_GROWTH, f"the server's memory grows: {memory}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=10_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        attack_all(arguments.connections // len(EVERY_KIND), Path(folder))


if __name__ == "__main__":
    main()

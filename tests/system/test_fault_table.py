"""What goes wrong between a client and a server, with the server a process of its own.

After each row the server lives, its next answer is right, and it has as many descriptors, threads
and, but for what an allocator keeps, as much memory as before. What kills, stops or floods servers
is in test_servers.py, and a server whose worker fails at the end of this file.
"""

import dataclasses
import pickle
import re
import struct
import time
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from seqpar.servers.status_client import ask
from seqpar.servers.transport.curve_keys import client_keys, generate, server_keys
from seqpar.servers.wire import protocol
from seqpar.servers.wire.codec import pack
from seqpar.servers.wire.limits import Limits
from seqpar.servers.wire.payload import checksum
from seqpar.servers.wire.protocol import Failed, Malformed, Refused, Stale
from tests.support.requests import random_request
from tests.support.servers import QUICK, Client, ServerProcess, right_answer, usage, wait_until
from tests.tools.fuzz_protocol import Canary, step

REQUEST = random_request(0)
# With as many credits, no connection ends because of its damaged payloads.
LIMITS = Limits(tokens=4096, bytes=2**20, queued_bytes=2**22, requests=2**16, clients=4)
GROWTH = 2**24  # bytes that a server may keep


def parts(request):
    return [x.tobytes() for x in pack(request).parts]


def replayed(client):
    """A frame that comes again, in its lease and in one that follows."""
    packed = pack(REQUEST)
    data = protocol.encode(packed.numbered(client.generation, next(client.numbers)), client.session)
    client.say(data, *parts(REQUEST))
    assert right_answer(*client.hear(), REQUEST)
    client.say(data, *parts(REQUEST))
    yield client.hear(), Failed, "used"
    old = client.generation
    client.say(protocol.Hello("0.1.0", "test", ["zmq"], []))
    client.generation = client.hear()[0].generation
    client.say(data, *parts(REQUEST))
    message, frames = client.hear()
    assert message == Stale(old) and not frames


def flipped(client):
    """Any bit of a message, and one of each part of a payload."""
    packed = pack(REQUEST)
    data = protocol.encode(packed.numbered(client.generation, 99), client.session)
    for i in range(0, 8 * len(data), 7):
        changed = bytearray(data)
        changed[i // 8] ^= 1 << i % 8
        client.say(bytes(changed), *parts(REQUEST))
        yield client.hear(), Malformed | Refused, "."
    for i, part in enumerate(packed.parts):
        packed.parts[i] = part.copy()
        packed.parts[i][-1] ^= 1
        yield client.ask(packed), Failed, "checksum"
        packed.parts[i] = part


def pickled(client):
    """Bytes of a pickle in place of a message, and of a payload."""
    canary = Path(f"{client.address.removeprefix('ipc://')}-canary")
    data = pickle.dumps(Canary(str(canary)))
    client.say(data)
    yield client.hear(), Malformed, "magic"
    body = (
        protocol._PREFIX.pack(b"SQPR", protocol.VERSION, 0, zlib.crc32(bytes(16) + data))
        + bytes(16)
        + data
    )
    client.say(body)
    yield client.hear(), Malformed, "."
    packed = pack(REQUEST)
    packed.parts[3] = np.frombuffer(data, np.uint8)
    yield client.ask(packed), Failed, "."
    assert not canary.exists()


def promised(*changes):
    """Headers that promise something else, each with what the refusal says."""

    def attempts(client):
        for change, said in changes:
            yield client.ask(pack(REQUEST), **change), Failed, said

    return attempts


def unknown(client):
    """An operation, a dtype, a kind of message and a version that do not exist."""
    fields = msgspec.to_builtins(pack(REQUEST).numbered(client.generation, 99))
    for change in ({"op": "sideways"}, {"dtype": "int8"}, {"type": "Tusk"}):
        body = msgspec.msgpack.encode(fields | change)
        head = protocol._PREFIX.pack(
            b"SQPR", protocol.VERSION, 0, zlib.crc32(bytes(16) + body)
        ) + bytes(16)
        client.say(head + body, *parts(REQUEST))
        yield client.hear(), Malformed, next(iter(change))
    data = bytearray(protocol.encode(protocol.Ping(1)))
    struct.pack_into("<H", data, 4, protocol.VERSION + 6)
    client.say(bytes(data))
    yield client.hear(), Refused, f"speaks {protocol.VERSION} .* the peer {protocol.VERSION + 6}"


def few(client):
    """No token, one, and odd lengths: each has a result."""
    for rows in ((0, 0), (0, 7), (7, 0), (1, 1), (33, 65)):
        request = random_request(1, *rows)
        assert right_answer(*client.ask(pack(request)), request)
    yield from promised(({"batch": 0}, "batch"))(client)


def not_numbers(client):
    """NaN and infinity: another client's results keep their bits."""
    mad = random_request(5)
    mad.q[:], mad.v[:] = torch.nan, torch.inf
    with Client(client.address) as other:
        for _ in range(4):
            client.say(pack(mad).numbered(client.generation, next(client.numbers)), *parts(mad))
        assert right_answer(*other.ask(pack(REQUEST)), REQUEST)
        other.say(protocol.Goodbye(other.generation))
    for _ in range(4):
        assert isinstance(client.hear()[0], protocol.Result)
    yield from ()


def tables(client):
    """Slices that are empty, decrease, or leave their rows."""
    for row in ([2, 2, 0, 8], [4, 2, 0, 8], [0, 99, 0, 8], [0, 8, 5, 3], [-1, 8, 0, 8]):
        request = random_request(2, 8, 8)
        packed = pack(request)
        table = packed.parts[0].view(np.int64).copy()
        table[:4] = row
        packed.parts[0] = table.view(np.uint8)
        right = checksum(packed.parts)
        yield client.ask(packed, checksum=right), Failed, "rows|overlap"


def steps(client):
    """Steps of a cache: again, with a bit flipped, as a pickle, above caps, and without a cache."""
    first, second = step(0, 0, 0, 2, 20), step(1, 1, 20, 2, 3)
    data = protocol.encode(first.numbered(client.generation, next(client.numbers)), client.session)
    frames = [x.tobytes() for x in first.parts]
    client.say(data, *frames)
    assert isinstance(client.hear()[0], protocol.Result)
    client.say(data, *frames)
    yield client.hear(), Failed, "used"
    yield client.ask(first), protocol.Lost, "."
    for i in range(0, 8 * len(data), 11):
        changed = bytearray(data)
        changed[i // 8] ^= 1 << i % 8
        client.say(bytes(changed), *frames)
        yield client.hear(), Malformed | Refused, "."
    for i, part in enumerate(second.parts):
        for wrong in (part ^ np.uint8(1), np.frombuffer(pickle.dumps(Path()), np.uint8), part[:-1]):
            second.parts[i] = wrong
            yield client.ask(second), Failed, "checksum|must have"
        second.parts[i] = part
    for change, said in (
        ({"k_rows": 2**62}, "k_rows"), ({"start": 2**62}, "."), ({"heads": 3}, "multiple"),
        ({"k_rows": 4096, "kv_heads": 1024, "heads": 1024, "dim": 1024}, "payload"),
        ({"writes": 2}, "."), ({"cache": 8}, "."), ({"offset": 2**62}, "offset"),
        ({"left": 2**62, "right": 2**62, "start": 21}, "."),
    ):  # fmt: skip
        yield client.ask(second, **change), Failed | protocol.Lost, said
    mad = step(2, 1, 20, 2, 3)
    for part in mad.parts:
        part.view(np.float32)[:] = np.nan
    header = msgspec.structs.replace(mad.header, checksum=checksum(mad.parts))
    assert isinstance(client.ask(dataclasses.replace(mad, header=header))[0], protocol.Result)
    client.say(protocol.Free(client.generation, first.header.cache))
    yield client.ask(second), protocol.Lost, "."


ROWS = {
    "a replayed frame": replayed,
    "a flipped bit": flipped,
    "a pickle": pickled,
    "a product above 64 bits": promised(
        ({"q_rows": 2**62, "heads": 2**62, "dim": 2**62}, "q_rows"),
        ({"batch": 2**40, "q_rows": 2**40}, "batch|q_rows"),
        ({"slices": 2**62}, "slices"),
    ),
    "other sizes than the payload has": promised(
        ({"k_rows": 63}, "k_positions must have"), ({"dim": 9}, "q must have"),
        ({"value_dim": 9}, "v must have"), ({"slices": 2}, "slices must have"),
        ({"dtype": "float64"}, "q must have"), ({"op": "backward"}, "payload must have"),
    ),
    "a terabyte": promised(
        ({"q_rows": 4096, "heads": 1024, "dim": 1024}, "payload|result"),
        ({"k_rows": 2**38}, "k_rows"),
    ),
    "what does not exist": unknown,
    "heads that do not go together": promised(
        ({"heads": 3}, "heads must be a multiple of kv_heads"), ({"heads": 4}, "q must have"),
        ({"kv_heads": 0}, "kv_heads"),
    ),
    "few tokens": few,
    "not a number": not_numbers,
    "tables of slices": tables,
    "steps of a cache": steps,
}  # fmt: skip


def assert_as_before(server, before, keys=None):
    """Hold a server to what it used before; it must live."""
    wait_until(lambda: usage(server.process.pid)[:2] <= before[:2])
    assert usage(server.process.pid)[2] < before[2] + GROWTH
    assert ask(server.address, keys, 10.0).waiting == 0 and server.process.is_alive()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with small caps, and what it uses after an answer."""
    address = f"ipc://{tmp_path_factory.mktemp('server')}/s"
    process = ServerProcess(address, limits=LIMITS, deadlines=QUICK)
    try:
        good(process.address)
        yield process, usage(process.process.pid)
    finally:
        process.end()


def good(address):
    """Have one task computed right."""
    with Client(address) as client:
        assert right_answer(*client.ask(pack(REQUEST)), REQUEST)
        client.say(protocol.Goodbye(client.generation))


@pytest.mark.parametrize("row", ROWS)
def test_bad_input_is_refused_and_harms_nothing_else(server, row):
    process, before = server
    start = time.monotonic()
    with Client(process.address) as client:
        for (message, frames), kind, said in ROWS[row](client):
            assert isinstance(message, kind) and not frames, message
            found = getattr(message, "reason", "no cache")
            assert re.search(said, found), found
        client.say(protocol.Goodbye(client.generation))
    assert time.monotonic() - start < 20
    good(process.address)
    assert_as_before(process, before)


def test_wrong_and_missing_keys_are_refused_in_time(tmp_path):
    keys, others = (generate(tmp_path / name)[0].parent for name in ("keys", "others"))
    (others / "server.public").write_bytes((keys / "server.public").read_bytes())
    deadlines = dataclasses.replace(QUICK, handshake=0.4)
    server = ServerProcess("tcp://127.0.0.1:*", keys=server_keys(keys), deadlines=deadlines)
    try:
        assert ask(server.address, keys, 10.0).tasks == 0
        before = usage(server.process.pid)
        assert client_keys(others)
        for wrong in (others, None):
            start = time.monotonic()
            with pytest.raises(TimeoutError):
                ask(server.address, wrong, 1.5 * deadlines.handshake)
            assert time.monotonic() - start < 10
        assert_as_before(server, before, keys)
        assert ask(server.address, keys, 10.0).tasks == 0
    finally:
        server.end()


@pytest.mark.parametrize("fails", ["MemoryError", "RuntimeError"])
def test_a_computation_that_fails_harms_no_other_request(tmp_path, fails):
    bad = random_request(3, 40, 41)
    server = ServerProcess(f"ipc://{tmp_path}/s", fails=(fails, 40, 41), deadlines=QUICK)
    try:
        good(server.address)
        before = usage(server.process.pid)
        for _ in range(5):
            with Client(server.address) as client:
                message, frames = client.ask(pack(bad))
                assert message.reason == f"the computation failed: {fails}" and not frames
                assert right_answer(*client.ask(pack(REQUEST)), REQUEST)
                client.say(protocol.Goodbye(client.generation))
        assert_as_before(server, before)
    finally:
        server.end()

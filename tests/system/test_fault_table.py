"""What goes wrong between a client and a server, with the server a process of its own.

After each row the server lives, its next answer is right, and it has as many descriptors, threads
and, but for what an allocator keeps, as much memory as before. What kills, stops or floods servers
is in test_servers.py, and a server whose worker fails at the end of this file.
"""

import dataclasses
import pickle
import re
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch

from seqpar.__main__ import main
from seqpar.servers.status_client import StatusError, ask
from seqpar.servers.wire.codec import pack
from seqpar.servers.wire.limits import Limits
from seqpar.servers.wire.payload import checksum
from tests.support.requests import random_request
from tests.support.servers import QUICK, Client, ServerProcess, same, usage, wait_until
from tests.tools.fuzz_protocol import Canary, step

REQUEST = random_request(0)
LIMITS = Limits(tokens=4096, bytes=2**20, queued_bytes=2**22, clients=4)
GROWTH = 2**24  # bytes that a server may keep
READERS = 8  # the most threads that check payloads and return memory, of server/service.py
INVALID, LOST = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
STALE = grpc.StatusCode.FAILED_PRECONDITION


def right(client, request):
    """Whether a request's result is right."""
    found = client.ask(pack(request))
    return isinstance(found, list) and same(found, request)


def foreign(client):
    """A session that does not exist, and one that has ended."""
    yield client.ask(pack(REQUEST), session=bytes(16)), STALE, "session"
    with Client(client.address) as other:
        assert right(other, REQUEST)
        old = other.session
    wait_until(lambda: client.ask(pack(REQUEST), session=old) == STALE)


def flipped(client):
    """Any bit of a header, and one of each part of a payload."""
    packed = pack(REQUEST)
    first, *others = client.requests(packed.header(client.session), [])
    assert not others
    for i in range(0, 8 * len(first), 7):
        changed = bytearray(first)
        changed[i // 8] ^= 1 << i % 8
        payload = client.requests(packed.header(client.session), packed.parts)
        data = next(payload)[len(first) :]
        found = client.hear(client.compute([bytes(changed) + data]), packed)
        if isinstance(found, list):  # a bit without a meaning, as of a boolean that is 3 for 1
            assert same(found, REQUEST)
        else:
            yield found, (INVALID, STALE), "."
    for i, part in enumerate(packed.parts):
        packed.parts[i] = part.copy()
        packed.parts[i][-1] ^= 1
        yield client.ask(packed), INVALID, "checksum"
        packed.parts[i] = part


def pickled(client):
    """Bytes of a pickle in place of a message, and of a payload."""
    canary = Path(f"{client.address.removeprefix('ipc://')}-canary")
    data, packed = pickle.dumps(Canary(str(canary))), pack(REQUEST)
    yield client.hear(client.compute([data]), packed), INVALID, "decoded|task"
    packed.parts[3] = np.resize(np.frombuffer(data, np.uint8), packed.parts[3].size)
    yield client.ask(packed), INVALID, "checksum"
    assert not canary.exists()


def promised(*changes):
    """Headers that promise something else, each with what the refusal says."""

    def attempts(client):
        for change, said in changes:
            yield client.ask(pack(REQUEST), **change), INVALID, said

    return attempts


def unknown(client):
    """An operation, a dtype, and a field that do not exist."""
    packed = pack(REQUEST)
    header, version = packed.header(client.session), client.version
    for field, value in (("operation", 9), ("dtype", 9), ("operation", 0)):
        message = version.messages.ComputeRequest.FromString(version.request(header))
        setattr(message.task, field, value)
        yield client.hear(client.compute([message.SerializeToString()]), packed), INVALID, field
    message = version.messages.ComputeRequest.FromString(version.request(header))
    message.task.MergeFromString(bytes([0xA0, 0x06, 0x01]))  # field 100
    yield client.hear(client.compute([message.SerializeToString()]), packed), INVALID, "fields"


def few(client):
    """No token, one, and odd lengths: each has a result."""
    for rows in ((0, 0), (0, 7), (7, 0), (1, 1), (33, 65)):
        assert right(client, random_request(1, *rows))
    yield from promised(({"batch": 0}, "batch"))(client)


def not_numbers(client):
    """NaN and infinity: another client's results keep their bits."""
    mad = random_request(5)
    mad.q[:], mad.v[:] = torch.nan, torch.inf
    packed = pack(mad)
    calls = [client.begin(packed) for _ in range(4)]
    with Client(client.address) as other:
        assert right(other, REQUEST)
    for call in calls:
        assert isinstance(client.hear(call, packed), list)
    yield from ()


def tables(client):
    """Slices that are empty, decrease, or leave their rows."""
    for row in ([2, 2, 0, 8], [4, 2, 0, 8], [0, 99, 0, 8], [0, 8, 5, 3], [-1, 8, 0, 8]):
        request = random_request(2, 8, 8)
        packed = pack(request)
        table = packed.parts[0].view(np.int64).copy()
        table[:4] = row
        packed.parts[0] = table.view(np.uint8)
        yield client.ask(packed, checksum=checksum(packed.parts)), INVALID, "rows|overlap"


def steps(client):
    """Steps of a cache: again, with a bit flipped, above caps, and without a cache."""
    first, second = step(0, 0, 0, 2, 20), step(1, 1, 20, 2, 3)
    assert isinstance(client.ask(first), list)
    yield client.ask(first), LOST, "."
    for i, part in enumerate(second.parts):
        second.parts[i] = part ^ np.uint8(1)
        yield client.ask(second), INVALID, "checksum"
        second.parts[i] = part
    for change, said in (
        ({"k_rows": 2**62}, "k_rows"), ({"heads": 3}, "multiple"),
        ({"k_rows": 4096, "kv_heads": 1024, "heads": 1024, "dim": 1024}, "payload"),
    ):  # fmt: skip
        yield client.ask(second, **change), INVALID, said
    for change in (
        {"start": 2**62}, {"writes": 2}, {"cache": 8}, {"offset": 2**62},
        {"left": 2**62, "right": 2**62, "start": 21},
    ):  # fmt: skip
        yield client.ask(second, step=second.step._replace(**change)), (INVALID, LOST), "."
    mad = step(2, 1, 20, 2, 3)
    for part in mad.parts:
        part.view(np.float32)[:] = np.nan
    assert isinstance(client.ask(dataclasses.replace(mad, checksum=checksum(mad.parts))), list)
    assert client.free(first.step.cache) == grpc.StatusCode.OK
    yield client.ask(second), LOST, "."


ROWS = {
    "another session": foreign,
    "a flipped bit": flipped,
    "a pickle": pickled,
    "a product above 64 bits": promised(
        ({"q_rows": 2**62, "heads": 2**62, "dim": 2**62}, "q_rows"),
        ({"batch": 2**40, "q_rows": 2**40}, "batch|q_rows"),
        ({"slices": 2**62}, "slices"),
    ),
    "other sizes than the payload has": promised(
        ({"k_rows": 63}, "bytes were missing"), ({"k_rows": 65}, "bytes are missing"),
        ({"dim": 9}, "bytes are missing"), ({"value_dim": 9}, "bytes are missing"),
        ({"slices": 2}, "bytes are missing"), ({"dtype": "float64"}, "bytes are missing"),
        ({"operation": "backward"}, "bytes are missing"), ({"operation": "step"}, "step"),
        ({"dtype": "bfloat16"}, "bytes were missing"),
    ),
    "a terabyte": promised(
        ({"q_rows": 4096, "heads": 1024, "dim": 1024}, "payload|result"),
        ({"k_rows": 2**38}, "k_rows"),
    ),
    "what does not exist": unknown,
    "heads that do not go together": promised(
        ({"heads": 3}, "heads must be a multiple of kv_heads"), ({"heads": 4}, "bytes are missing"),
        ({"kv_heads": 0}, "kv_heads"),
    ),
    "few tokens": few,
    "not a number": not_numbers,
    "tables of slices": tables,
    "steps of a cache": steps,
}  # fmt: skip


def assert_as_before(server, before, keys=None):
    """Hold a server to what it used before; it must live."""
    descriptors, threads, _ = before
    # A check of a payload, and the end of a session, start another thread if none of them is idle.
    most = descriptors, threads + READERS
    wait_until(lambda: all(x <= y for x, y in zip(usage(server.process.pid), most, strict=False)))
    assert usage(server.process.pid)[2] < before[2] + GROWTH
    assert ask(server.address, keys, 10.0).waiting == 0 and server.process.is_alive()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with small caps, and what it uses after an answer."""
    address = f"ipc://{tmp_path_factory.mktemp('server')}/s"
    process = ServerProcess(address, limits=LIMITS, deadlines=QUICK)
    try:
        yield process, used_after_a_task(process)
    finally:
        process.end()


def used_after_a_task(server):
    """Return what a server uses when it has computed a task and ended its session."""
    good(server.address)
    wait_until(lambda: ask(server.address, None, 10.0).clients == 0)
    return usage(server.process.pid)


def good(address):
    """Have one task computed right."""
    with Client(address) as client:
        assert right(client, REQUEST)


@pytest.mark.parametrize("row", ROWS)
def test_bad_input_is_refused_and_harms_nothing_else(server, row):
    process, before = server
    start = time.monotonic()
    with Client(process.address) as client:
        for found, code, said in ROWS[row](client):
            assert found in (code if isinstance(code, tuple) else (code,)), found
            assert re.search(said, client.details), client.details
    assert time.monotonic() - start < 20
    good(process.address)
    assert_as_before(process, before)


def test_wrong_and_missing_keys_are_refused_in_time(tmp_path):
    keys, others = tmp_path / "keys", tmp_path / "others"
    for folder in (keys, others):
        assert main(["keygen", str(folder)]) == 0
    server = ServerProcess("tcp://127.0.0.1:*", keys=keys, deadlines=QUICK)
    try:
        assert ask(server.address, keys, 10.0).tasks == 0
        before = usage(server.process.pid)
        for wrong in (others, None):
            start = time.monotonic()
            with pytest.raises(StatusError):
                ask(server.address, wrong, 2.0)
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
        before = used_after_a_task(server)
        for _ in range(5):
            with Client(server.address) as client:
                assert client.ask(pack(bad)) == grpc.StatusCode.INTERNAL
                assert client.details == f"the computation failed: {fails}"
                assert right(client, REQUEST)
        assert_as_before(server, before)
    finally:
        server.end()

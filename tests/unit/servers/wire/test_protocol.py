"""Control messages and headers: what is right survives, and all else is refused by name."""

import re
import struct
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from seqpar.servers.server.clients import ClientConnection
from seqpar.servers.server.compute import compute
from seqpar.servers.transport.zeromq import Frames
from seqpar.servers.wire import protocol
from seqpar.servers.wire.codec import pack, unpack, unpack_result
from seqpar.servers.wire.header import check_tables, form_of
from seqpar.servers.wire.limits import Deadlines, Limits, ServerDeadlines
from seqpar.servers.wire.payload import RequestError, bytes_of, checksum
from seqpar.servers.wire.protocol import Ping, ProtocolError, VersionMismatch, decode, encode
from tests.support.requests import CASES, backward, forward, random_request
from tests.tools.fuzz_protocol import fuzz

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[4]


def of_body(body, magic=b"SQPR", version=protocol.VERSION, reserved=0, crc=None):
    rest = bytes(16) + body
    crc = zlib.crc32(rest) if crc is None else crc
    return struct.pack("<4sHHI", magic, version, reserved, crc) + rest


def of_fields(**fields):
    return of_body(msgspec.msgpack.encode(fields))


def test_messages_survive():
    for message in (Ping(7), protocol.Failed(1, 2, "because"), task()):
        assert decode(encode(message)) == message


@pytest.mark.parametrize(("data", "said"), [
    (b"", "length"),
    (b"SQPR", "length"),
    (b"x" * 2**17, "length"),
    (of_body(b"\x80", magic=b"HTTP"), "magic"),
    (of_body(b"\x80", crc=1), "checksum"),
    (of_body(b"\x80", reserved=1), "checksum"),
    (of_body(b""), "length"),
    (of_body(b"\xc1"), "message"),
    (of_body(b"\x91" * 5000), "message"),
    (of_fields(type="Shutdown"), "type"),
    (of_fields(type="Ping"), "message"),
    (of_fields(type="Ping", generation="secret"), "generation"),
    (of_fields(type="Ping", generation=-1), "generation"),
    (of_fields(type="Ping", generation=2**63), "generation"),
    (of_fields(type="Ping", generation=1, secret=2), "message"),
    (of_fields(type="Refused", reason="x" * 5000), "reason"),
])  # fmt: skip
def test_an_undecodable_message_is_refused_without_showing_it(data, said):
    with pytest.raises(ProtocolError, match=said) as caught:
        decode(data)
    assert "secret" not in str(caught.value)


def test_another_version_names_both():
    with pytest.raises(
        VersionMismatch, match=rf"speaks {protocol.VERSION} .* the peer 9"
    ) as caught:
        decode(of_body(b"anything at all", version=9))
    assert caught.value.theirs == 9


def task(**changes):
    header = pack(random_request(0)).numbered(3, 1)
    return msgspec.structs.replace(header, **changes)


@pytest.mark.parametrize(("changes", "said"), [
    ({"q_rows": 2**62}, "q_rows"),
    ({"k_rows": 4097}, "k_rows"),
    ({"batch": 0}, "batch"),
    ({"batch": 4096, "q_rows": 4096}, "q_rows"),
    ({"heads": 2**40}, "heads"),
    ({"heads": 0}, "heads"),
    ({"heads": 3}, "multiple"),
    ({"dim": 0}, "dim"),
    ({"value_dim": 2**32}, "value_dim"),
    ({"slices": 2**62}, "slices"),
    ({"scale": float("nan")}, "scale"),
    ({"scale": float("-inf")}, "scale"),
    ({"softcap": -1.0}, "softcap"),
    ({"softcap": float("inf")}, "softcap"),
    ({"q_rows": 4096, "heads": 1024, "kv_heads": 1, "dim": 1024}, "payload"),
    ({"q_rows": 2048, "heads": 1024, "kv_heads": 1, "dim": 1, "value_dim": 4}, "result"),
])  # fmt: skip
def test_headers_above_a_cap_are_refused_by_name(changes, said):
    with pytest.raises(RequestError, match=said):
        form_of(task(**changes)).check(Limits(tokens=4096, bytes=2**24))


def tables(**changes):
    table = {"q": (0, 4), "k": (0, 8), "band": (-9, 0)} | changes
    row = [*table["q"], *table["k"], *table["band"]]
    q = np.array(changes.get("q_positions", [4, 5, 6, 7]), np.int32)
    k = np.array(changes.get("k_positions", range(8)), np.int32)
    check_tables(np.array([row] * changes.get("times", 1), np.int64), q, k)


@pytest.mark.parametrize(("changes", "said"), [
    ({"q": (0, 5)}, "q rows"),
    ({"q": (-1, 4)}, "q rows"),
    ({"q": (2, 2)}, "q rows"),
    ({"k": (3, 2)}, "k rows"),
    ({"k": (0, 2**62)}, "k rows"),
    ({"q_positions": [4, 5, 5, 7]}, "q_positions"),
    ({"q_positions": [4, 6, 5, 7]}, "q_positions"),
    ({"q_positions": [-4, 5, 6, 7]}, "q_positions"),
    ({"k_positions": [0, 1, 2, 3, 4, 5, 7, 6]}, "k_positions"),
    ({"band": (1, 0)}, "bands"),
    ({"band": (-(2**62), 0)}, "bands"),
    ({"times": 3}, "overlap"),
])  # fmt: skip
def test_tables_that_leave_their_rows_are_refused(changes, said):
    tables()
    tables(times=2)  # as a causal mask and a prefix
    with pytest.raises(RequestError, match=said):
        tables(**changes)


def test_positions_may_fall_between_slices():
    check_tables(np.array([[0, 2, 0, 2, -9, 0], [2, 4, 2, 4, -9, 0]]),
                 np.array([0, 1, 0, 1], np.int32), np.array([0, 1, 0, 1], np.int32))  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_requests_and_results_survive(name):
    request = forward(CASES[name], exact_out=True)
    out, lse = same_after_travel(request)
    same_after_travel(backward(CASES[name], out.to(request.q.dtype), lse))


def same_after_travel(request):
    """Its results, which are the same for what arrives."""
    packed = pack(request)
    header = decode(encode(packed.numbered(1, 1)))
    arrived = unpack(header, [x.tobytes() for x in packed.parts], request.options.backend)
    assert arrived.options == request.options and arrived.exact_out == request.exact_out
    results, expected = compute([arrived], CPU)[0], compute([request], CPU)[0]
    buffers = [x.tobytes() for x in bytes_of(results)]
    back = unpack_result(packed.form.result, buffers, checksum(buffers))
    for x, y, z in zip(back, results, expected, strict=True):
        assert x.shape == y.shape and torch.equal(x, y) and torch.equal(x, z)
    with pytest.raises(RequestError, match="checksum"):
        unpack_result(packed.form.result, buffers, checksum(buffers) ^ 1)
    return back


@pytest.mark.parametrize("change", [lambda parts: parts[:-1], lambda parts: [*parts, b""]])
def test_a_payload_of_other_parts_is_refused(change):
    packed = pack(random_request(0))
    with pytest.raises(RequestError, match="payload must have 6 parts"):
        unpack(packed.numbered(1, 1), change([x.tobytes() for x in packed.parts]), "default")


def test_tasks_of_one_layout_share_tables():
    first, second, other = (pack(random_request(i, 8 + i // 2)) for i in range(3))
    arrived = [unpack(x.numbered(1, i), x.parts, "default") for i, x in enumerate((first, second))]
    assert arrived[0].slices is arrived[1].slices and arrived[0].slices.q_rows.flags.writeable
    assert first.form is second.form and other.form is not first.form
    tables = pack(random_request(5)).parts[:3]
    assert not any(np.shares_memory(x, arrived[0].slices.q_positions) for x in tables)


def test_a_number_is_used_once_in_any_order():
    client = ClientConnection(b"", Frames(), credits=1)
    assert [client.use(x) for x in (3, 1, 3, 2, 1, 0, 5000)] == [1, 1, 0, 1, 0, 0, 1]
    assert not client.use(4) and client.use(4999) and not client.use(4999)
    assert (
        sum(map(client.use, range(5001, 20000))) == 14999 and len(client._used_numbers) <= 2**11 + 1
    )


def test_a_part_of_wrong_size_is_refused():
    packed = pack(random_request(0))
    for i, name in enumerate(["slices", "q_positions", "k_positions", "q", "k", "v"]):
        buffers = [x.tobytes() for x in packed.parts]
        buffers[i] += b"\0"
        with pytest.raises(RequestError, match=f"^{name} must have"):
            unpack(packed.numbered(1, 1), buffers, "default")


@pytest.mark.parametrize("size", [1, 100, 2**15, 2**15 + 9, 2**18])
def test_a_flipped_bit_is_seen(size):
    random = np.random.default_rng(size)
    data = random.integers(0, 256, size, dtype=np.uint8)
    whole = checksum([data])
    assert checksum([data.tobytes()]) == whole
    for _ in range(200):
        i, bit = int(random.integers(size)), np.uint8(1 << random.integers(8))
        data[i] ^= bit
        assert checksum([data]) != whole
        data[i] ^= bit


def moved_block(random, data):
    size = 8 * int(2 ** random.integers(0, 10))
    a, b = (size * int(x) for x in random.choice(data.size // size, 2, replace=False))
    data[a : a + size], data[b : b + size] = data[b : b + size].copy(), data[a : a + size].copy()


def swapped_halves(random, data):
    size = int(2 ** random.integers(6, 14))
    start = size * int(random.integers(data.size // size))
    data[start : start + size] = np.roll(data[start : start + size], size // 2)


def flips_in_a_column(random, data):
    words, stride = data.view(np.uint64), int(2 ** random.integers(0, 13))
    column = int(random.integers(stride))
    rows = random.choice(words.size // stride, 2, replace=False) * stride + column
    words[rows] ^= np.uint64(1) << np.uint64(random.integers(64))


@pytest.mark.parametrize("damage", [moved_block, swapped_halves, flips_in_a_column])
def test_the_checksum_depends_on_positions(damage):
    random = np.random.default_rng(0)
    data = random.integers(0, 256, 2**17, dtype=np.uint8)
    whole, missed, trials = checksum([data]), 0, 0
    while trials < 6667:
        damaged = data.copy()
        damage(random, damaged)
        missed += checksum([damaged]) == whole
        trials += 1
    assert not missed


def test_the_checksum_depends_on_the_order_of_parts():
    a, b = bytes(range(100)), bytes(range(100, 180))
    sums = {checksum(parts) for parts in ([a, b], [b, a], [a + b], [a[:50], a[50:] + b], [a, b""])}
    assert len(sums) == 5
    assert checksum([a, b]) == checksum([b], checksum([a])) and checksum([b"", b""])
    assert len({checksum([b""] * n) for n in range(4)}) == 4


def test_damaged_messages_are_refused(tmp_path):
    counts = fuzz(0, range(2000), tmp_path / "canary")
    assert counts["refused"] > 1800


def test_nothing_is_unpickled():
    forbidden = re.compile(
        r"\b(pickle|cloudpickle|marshal|torch\.load|recv_pyobj|send_pyobj|eval)\b"
    )
    for folder in ("servers", "commands"):
        for file in (ROOT / "seqpar" / folder).rglob("*.py"):
            assert not forbidden.search(file.read_text()), file


@pytest.mark.parametrize(("values", "named"), [
    ({"connect": 0}, "connect"), ({"request": 1.0}, "request"), ({"group": 100.0}, "group"),
    ({"hedge": float("nan")}, "hedge"),
])  # fmt: skip
def test_deadlines_are_ordered(values, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        Deadlines(**values)


def test_limits_and_a_servers_deadlines_are_positive():
    with pytest.raises(ValueError, match=r"^clients"):
        Limits(clients=0)
    with pytest.raises(ValueError, match=r"^idle"):
        ServerDeadlines(idle=0)

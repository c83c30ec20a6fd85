"""Payloads: their checksum, their chunks, and how they arrive."""

import numpy as np
import pytest
import torch

from seqpar.servers.wire.payload import (
    CHUNK_BYTES,
    Incoming,
    Payload,
    PayloadTensor,
    RequestError,
    checksum,
    chunks,
)


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


INT64, FLOAT = torch.int64, torch.float32
PARTS = [
    PayloadTensor("a", INT64, (3, 2)),
    PayloadTensor("empty", FLOAT, (0, 4)),
    PayloadTensor("b", FLOAT, (5,)),
]


@pytest.mark.parametrize("size", [1, 7, 48, 68])
def test_payloads_arrive_in_any_pieces(size):
    payload, data = Payload(PARTS), bytes(range(68))
    incoming = Incoming(payload)
    for start in range(0, len(data), size):
        assert incoming.missing == len(data) - start
        incoming.take(data[start : start + size])
    assert not incoming.missing
    assert [bytes(x) for x in incoming.parts] == [data[:48], b"", data[48:]]
    a, empty, b = payload.tensors(incoming.parts)
    assert a.shape == (3, 2) and empty.shape == (0, 4) and b.numpy().tobytes() == data[48:]
    incoming.take(b"")
    with pytest.raises(RequestError, match="payload: 0 bytes were missing, 1 came"):
        incoming.take(b"x")


def test_a_payload_of_other_sizes_is_refused():
    payload, right = Payload(PARTS), [bytes(48), b"", bytes(20)]
    payload.check(right, checksum(right))
    with pytest.raises(RequestError, match="checksum"):
        payload.check(right, checksum(right) ^ 1)
    for wrong, said in (
        ([bytes(47), b"", bytes(20)], "a must have 48 bytes"),
        ([bytes(48), b"x", bytes(20)], "empty must have 0 bytes"),
        (right[:2], "payload must have 3 parts"),
    ):
        with pytest.raises(RequestError, match=said):
            payload.check(wrong, checksum(wrong))


@pytest.mark.parametrize("sizes", [[], [0], [1], [CHUNK_BYTES], [CHUNK_BYTES + 1, 0, 5], [9] * 40])
def test_chunks_have_all_bytes_in_order_and_are_full(sizes):
    random = np.random.default_rng(0)
    parts = [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    found = [b"".join(x.tobytes() for x in chunk) for chunk in chunks(parts)]
    assert b"".join(found) == b"".join(x.tobytes() for x in parts)
    assert all(len(x) == CHUNK_BYTES for x in found[:-1]) and all(found)

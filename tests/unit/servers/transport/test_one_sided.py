"""One-sided writes: what is written arrives, or the writer learns that it has not."""

import asyncio
import time

import numpy as np
import pytest

from seqpar.servers.transport import one_sided
from seqpar.servers.transport.one_sided import OneSided, TransportError, available
from seqpar.servers.wire.arena import Arena
from seqpar.servers.wire.codec import pack
from tests.support.requests import random_request
from tests.support.servers import connect, running, same, wait_until

nixl = pytest.mark.skipif(not available(), reason="needs nixl")


@pytest.fixture
def ends(monkeypatch):
    """Make ends with small blocks, which are shut down after the test."""
    monkeypatch.setattr(one_sided, "_BLOCK_BYTES", 2**20)
    monkeypatch.setattr(one_sided, "_MAX_ARENA_BYTES", 2**16)
    made = []

    def make():
        made.append(OneSided(f"test-{time.monotonic_ns()}"))
        return made[-1]

    yield make
    for end in made:
        end.shutdown()


@pytest.fixture
def pair(ends):
    """Two ends that know each other as "a" and "b", and how to reach them."""
    a, b = ends(), ends()
    to_a, to_b = a.open("b"), b.open("a")
    a.connect("b", to_b)
    b.connect("a", to_a)
    return a, b, to_b


def sent(a, b, parts, place=0, seconds=20.0):
    """Write parts from a to b, which polls meanwhile; return what b then reads."""

    async def write():
        async with asyncio.timeout(seconds):
            await b.polling(a.write("b", parts, place))

    asyncio.run(write())
    return [x.tobytes() for x in b.read("a", [x.size for x in parts], place)]


def payload(seed, *sizes):
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, n, dtype=np.uint8) for n in sizes]


@nixl
class TestOneSided:
    @pytest.mark.parametrize("sizes", [(), (0,), (1,), (64, 0, 63, 1), (5000, 7, 10000)])
    def test_a_payload_arrives_as_it_was(self, pair, sizes):
        a, b, _ = pair
        for seed in range(3):
            parts = payload(seed, *sizes)
            assert sent(a, b, parts, 128) == [x.tobytes() for x in parts]

    def test_one_tensor_may_be_several_parts(self, pair):
        """As where q is k and v too."""
        a, b, _ = pair
        (part,) = payload(1, 20000)
        assert sent(a, b, [part] * 3) == [part.tobytes()] * 3
        assert not a._stuck

    @pytest.mark.parametrize("place", [-64, 2**16 - 64, 2**40])
    def test_nothing_is_written_outside_the_peers_arena(self, pair, place):
        a, b, _ = pair
        with pytest.raises(TransportError, match="would not lie in the peer's arena"):
            sent(a, b, payload(1, 100), place)

    def test_nothing_is_read_outside_the_peers_arena(self, pair):
        _, b, _ = pair
        for place in (-1, 2**16 - 64, 2**40):
            with pytest.raises(TransportError, match="place"):
                b.read("a", [100], place)
        with pytest.raises(TransportError, match="place"):
            b.read("nobody", [100], 0)

    def test_what_is_read_is_a_copy(self, pair):
        """A peer that was given up may still write."""
        a, b, _ = pair
        parts = payload(1, 100)
        sent(a, b, parts)
        (read,) = b.read("a", [100], 0)
        sent(a, b, payload(2, 100))
        assert read.tobytes() == parts[0].tobytes()

    def test_a_forgotten_peer_returns_with_new_metadata(self, pair, ends):
        a, b, _ = pair
        a.close("b")
        assert a._rooms.lent == 0
        with pytest.raises(TransportError, match="would not lie"):
            sent(a, b, payload(1, 100))
        again = ends()
        a.open("b")
        a.connect("b", again.open("a"))
        assert sent(a, again, payload(2, 100)) == [payload(2, 100)[0].tobytes()]

    def test_a_write_that_is_given_up_leaves_nothing(self, pair):
        a, b, _ = pair
        with pytest.raises(TimeoutError):
            sent(a, b, payload(1, 100), seconds=0.0)
        assert sent(a, b, payload(2, 100)) == [payload(2, 100)[0].tobytes()]

    @pytest.mark.parametrize("change", [
        {"agent": b"nonsense"}, {"agent": b""}, {"address": 0}, {"address": 2**63}, {"size": 0}
    ])  # fmt: skip
    def test_an_arena_that_makes_no_sense_is_refused(self, pair, change):
        a, _, target = pair
        with pytest.raises(TransportError):
            a.connect("b", target._replace(**change))

    def test_what_is_sent_is_registered_only_meanwhile(self, pair):
        a, b, _ = pair
        before = a._agent.get_agent_metadata()
        for _ in range(3):
            sent(a, b, payload(1, 2**14, 3, 2**14))
        assert not a._stuck and len(a._agent.get_agent_metadata()) == len(before)

    def test_many_peers_share_the_block(self, ends):
        a = ends()
        sizes = [a.open(i).size for i in range(30)]
        assert sizes[0] == 2**16 >= max(sizes) and min(sizes) > 0
        assert a._rooms.lent <= 2**20
        for i in range(30):
            a.close(i)
        assert a._rooms.lent == 0

    def test_a_pool_and_a_server_use_it_if_both_ask(self, tmp_path):
        request, both = random_request(1), ["nixl", "grpc"]
        for theirs, ours, used in (
            (both, both, "nixl"),
            (both, None, "grpc"),
            (None, both, "grpc"),
        ):
            with (
                running(f"ipc://{tmp_path}/s", transports=theirs) as server,
                connect(server.address, transports=ours, home=False) as pool,
            ):
                assert same(pool.submit(request).result(20), request)
                assert pool.report().servers[0].transport == used

    def test_a_result_that_is_too_large_for_the_arena_travels_through_grpc(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(
            one_sided, "_MAX_ARENA_BYTES", pack(random_request(1)).form.request.room
        )
        request, both = random_request(1, 200, 10), ["nixl", "grpc"]
        with (
            running(f"ipc://{tmp_path}/s", transports=both) as server,
            connect(server.address, transports=both, home=False) as pool,
        ):
            assert same(pool.submit(request).result(20), request)

    def test_places_are_free_again_after_each_result(self, tmp_path):
        both = ["nixl", "grpc"]
        with (
            running(f"ipc://{tmp_path}/s", transports=both) as server,
            connect(server.address, transports=both, home=False) as pool,
        ):
            for seed in range(20):
                request = random_request(seed)
                assert same(pool.submit(request).result(20), request)
            (connection,) = pool.dispatcher().servers
            wait_until(lambda: connection._own_arena.lent == connection._server_arena.lent == 0)


def test_an_arena_lends_and_joins_blocks():
    random, arena, lent = np.random.default_rng(0), Arena(2**14), {}
    for _ in range(2000):
        if lent and random.random() < 0.5:
            arena.give(lent.pop(random.choice(list(lent)).item())[0])
        else:
            size = int(random.integers(1, 2000))
            start = arena.take(size)
            if start is not None:
                assert start % 64 == 0 and start + size <= 2**14
                assert all(stop <= start or start + size <= s for s, stop in lent.values())
                lent[start] = start, start + size
    for start, _ in lent.values():
        arena.give(start)
    assert arena.lent == 0 and arena.take(2**14) == 0 and arena.take(1) is None

"""Both transports by the same tests: what is sent arrives, or the sender learns that it has not."""

import time
from functools import partial

import numpy as np
import pytest

from seqpar.servers.transport import zeromq
from seqpar.servers.transport.one_sided import OneSided, available
from seqpar.servers.transport.zeromq import Frames, Sending, TransportError, joined
from seqpar.servers.wire.arena import Arena
from seqpar.servers.wire.protocol import Knock, decode

nixl = pytest.mark.skipif(not available(), reason="needs nixl")


@pytest.fixture(params=["zmq", pytest.param("nixl", marks=nixl)])
def ends(request):
    """Two ends of a transport that know each other as "a" and "b"."""
    if request.param == "zmq":
        a, b = Frames(), Frames()
    else:
        a, b = (OneSided(f"test-{time.monotonic_ns()}", 2**20) for _ in range(2))
    to_a, to_b = a.open("b", 2**16), b.open("a", 2**16)
    a.connect("b", to_b)
    b.connect("a", to_a)
    yield a, b
    a.shutdown()
    b.shutdown()


def sent(transport, peer, parts, place=0, other=None, seconds=5.0):
    """Send, and wait until it has arrived or failed."""
    sending = transport.begin(Sending(peer, b"message", time.monotonic() + seconds), parts, place)
    while sending.moving:
        transport.progress(sending)
        if other is not None:
            other.poll()
    return sending


def payload(seed, *sizes):
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, n, dtype=np.uint8) for n in sizes]


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (64, 0, 63, 1), (5000, 7, 10000)])
def test_a_payload_arrives_as_it_was(ends, sizes):
    a, b = ends
    for _ in range(3):
        parts = payload(1, *sizes)
        place = 128 if a.name == "nixl" else None
        sending = sent(a, "b", parts, place, other=b)
        assert sending.error is None and sending.message == b"message"
        arrived = b.read("a", sending.frames, sizes, place)
        assert [np.array(x).tobytes() for x in arrived] == [x.tobytes() for x in parts]


def test_one_tensor_may_be_several_parts(ends, monkeypatch):
    """As where q is k and v too, and too large to be joined."""
    monkeypatch.setattr(zeromq, "_BLOCK", 1000)
    a, b = ends
    (part,) = payload(1, 20000)
    place = 0 if a.name == "nixl" else None
    sending = sent(a, "b", [part] * 3, place, other=b)
    assert sending.error is None
    arrived = b.read("a", sending.frames, [20000] * 3, place)
    assert [np.array(x).tobytes() for x in arrived] == [part.tobytes()] * 3


def test_both_ways_at_once(ends):
    a, b = ends
    there, back, place = payload(1, 999), payload(2, 999), 0 if a.name == "nixl" else None
    sendings = [
        end.begin(Sending(peer, b"", time.monotonic() + 5), parts, place)
        for end, peer, parts in ((a, "b", there), (b, "a", back))
    ]
    while any(x.moving for x in sendings):
        a.progress(sendings[0])
        b.progress(sendings[1])
    assert bytes(b.read("a", sendings[0].frames, [999], place)[0]) == there[0].tobytes()
    assert bytes(a.read("b", sendings[1].frames, [999], place)[0]) == back[0].tobytes()


def test_a_message_waits_for_its_write(ends):
    a, b = ends
    sending = a.begin(Sending("b", b"message", time.monotonic() + 5), payload(1, 300), 0)
    written = []
    while sending.moving or (a.name == "nixl" and not written):
        a.progress(sending)
        written += b.poll()
    soon = time.monotonic() + 60
    if a.name == "zmq":
        assert not written and sending.due(soon)[0] == b"message"
    else:
        assert written == [("a", b"message")] and not sending.due(soon)
        assert decode(*sending.due(0.0)) == Knock()


def test_a_slow_write_is_reported_once():
    long_ago = time.monotonic() - 1
    moving = partial(Sending, "b", b"", 0.0, moving=True)
    assert not moving(notifies=True).due(0.0)
    assert not moving(started=long_ago).due(0.0)
    sending = moving(notifies=True, started=long_ago)
    assert decode(*sending.due(0.0)) == Knock(under_way=True) and not sending.due(0.0)


def test_small_payloads_are_one_part():
    parts = payload(1, 5, 0, 100)
    (block,) = joined(parts)
    assert block.size == 64 + 128 and not block[5:64].any()
    back = Frames().read("a", [block.tobytes()], [5, 0, 100], None)
    assert [bytes(x) for x in back] == [x.tobytes() for x in parts]
    large = payload(1, 5, 2**18)
    assert joined(large) is large and len(joined(parts[:1])) == 1


@pytest.fixture
def one_sided():
    """Make ends, all of which are shut down after the test."""
    made = []

    def make():
        made.append(OneSided(f"test-{time.monotonic_ns()}", 2**20))
        return made[-1]

    yield make
    for end in made:
        end.shutdown()


@pytest.fixture
def ends_of(one_sided):
    """Make two ends of which the first can write to the second, and how it reaches that."""

    def make():
        a, b = one_sided(), one_sided()
        target = b.open("a", 2**12)
        a.open("b", 2**12)
        a.connect("b", target)
        return a, b, target

    return make


@nixl
class TestOneSided:
    @pytest.mark.parametrize("place", [-64, 2**12 - 64, 2**40, None])
    def test_nothing_is_written_outside_the_peers_room(self, ends_of, place):
        a, *_ = ends_of()
        sending = sent(a, "b", payload(1, 100), place)
        assert sending.error is not None and not a._sendings

    def test_nothing_is_read_outside_the_peers_room(self, ends_of):
        _, b, _ = ends_of()
        b.open("c", 2**12)
        for place in (-1, 2**12 - 64, 2**40, None):
            with pytest.raises(TransportError, match="place"):
                b.read("a", [], [100], place)
        with pytest.raises(TransportError, match="place"):
            b.read("nobody", [], [100], 0)

    def test_a_forgotten_peer_returns_with_new_metadata(self, ends_of, one_sided):
        a, b, _ = ends_of()
        assert sent(a, "b", payload(1, 100), other=b).error is None
        a.close("b")
        assert a._rooms.lent == 0 and not a._sendings
        assert sent(a, "b", payload(1, 100)).error == "the peer has no room at that place"
        again = one_sided()
        a.open("b", 2**12)
        a.connect("b", again.open("a", 2**12))
        sending = sent(a, "b", payload(2, 100), other=again)
        assert bytes(again.read("a", sending.frames, [100], 0)[0]) == payload(2, 100)[0].tobytes()

    def test_a_deadline_ends_a_transfer(self, ends_of):
        a, b, target = ends_of()
        sending = sent(a, "b", payload(1, 100), seconds=-1.0)  # b has not answered yet
        assert "deadline" in sending.error and not a._sendings
        assert sent(a, "b", payload(2, 100)).error == "the peer has no room at that place"
        a.connect("b", target)  # its metadata was dropped
        assert sent(a, "b", payload(2, 100), other=b).error is None

    @pytest.mark.parametrize("change", [
        {"offer": b"nonsense"}, {"offer": b""}, {"base": 0}, {"base": 2**63}, {"arena": 0}
    ])  # fmt: skip
    def test_an_offer_that_makes_no_sense_is_refused(self, ends_of, change):
        a, _, target = ends_of()
        with pytest.raises(TransportError):
            a.connect("b", target._replace(**change))

    @pytest.mark.parametrize("sizes", [(100, 50), (2**18, 3, 2**18)])
    def test_what_is_sent_is_registered_only_meanwhile(self, one_sided, sizes):
        a, b = one_sided(), one_sided()
        a.open("b", 2**12)
        a.connect("b", b.open("a", 2**20))
        parts = payload(1, *sizes)
        before = a._agent.get_agent_metadata()
        for _ in range(3):
            sending = sent(a, "b", parts, 0, other=b)
            assert sending.error is None and not a._sendings and not a._stuck
            arrived = b.read("a", [], sizes, 0)
            assert [bytes(x) for x in arrived] == [x.tobytes() for x in parts]
        assert len(a._agent.get_agent_metadata()) == len(before)

    def test_many_peers_share_the_room(self, one_sided):
        a = one_sided()
        shares = [a.open(i, a.share(2**18)).arena for i in range(8)]
        assert shares[0] == 2**18 and shares[0] >= max(shares[1:]) and min(shares) > 2**15

    def test_rooms_are_used_up_and_freed(self, ends_of):
        a, _, _ = ends_of()
        assert a.open("c", 2**20).arena == 0
        assert a.open("c", 2**19).arena == 2**19
        assert a.open("c", 2**19).arena == 2**19  # in place of the other one
        a.close("c")
        a.close("c")
        assert a.open("d", 2**20 - 2**12).arena == 2**20 - 2**12


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


def test_frames_have_no_place():
    with pytest.raises(TransportError, match="frames"):
        Frames().read("a", [b""], [0], 0)

"""A server's caches: what continues them, what is lost, and what is refused by name."""

import re

import msgspec
import pytest
import torch

from seqpar.core.ranges import UNLIMITED
from seqpar.servers.server.caches import CacheLost, Caches
from seqpar.servers.transport.peers import Peer
from seqpar.servers.wire import protocol
from seqpar.servers.wire.codec import pack, pack_step
from seqpar.servers.wire.limits import Limits, ServerDeadlines
from seqpar.servers.wire.pages import Pages, RowShape, Seen
from seqpar.servers.wire.payload import RequestError, bytes_of
from seqpar.servers.wire.protocol import Failed, Free, Lost, Result
from seqpar.softmax.compute.call_options import CallOptions
from tests.support.requests import random_request
from tests.support.servers import CPU, Client, Gate, running, wait_until

SCORES = CallOptions(0.4, 0.0, "default", True)
SHAPE = RowShape(torch.float32, 2, 2, 8, 6)  # batch, KV heads, D, Dv
ROWS = 700  # of several pages


def drawn(rows, queries, shape=SHAPE):
    """q, k and v, with two query heads a KV head."""
    generator = torch.Generator().manual_seed(rows)
    batch, heads, dim, value_dim = shape[1:]
    sizes = (queries, 2 * heads, dim), (rows, heads, dim), (rows, heads, value_dim)
    return [torch.randn(batch, *x, generator=generator).to(shape.dtype) for x in sizes]


def attention(q, k, v, seen, scores=SCORES):
    """The oracle: out and lse in fp64."""
    q, k, v = q.double(), *(x.double().repeat_interleave(2, 2) for x in (k, v))
    logits = scores.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
    distance = torch.arange(k.shape[1]) - (torch.arange(q.shape[1]) + seen.offset)[:, None]
    logits[:, :, (distance > seen.right) | (distance < -seen.left)] = -torch.inf
    lse = logits.logsumexp(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", (logits - lse[..., None]).exp().nan_to_num(0.0), v)
    return out, lse.transpose(1, 2)


def written(k, v, *stops):
    """Pages whose rows were written in several parts, over others."""
    pages, start = Pages(SHAPE, CPU), 0
    for stop in stops:
        pages.reserve(stop)
        pages.write(start, k[:, start:stop] + 1, v[:, start:stop] + 1)
        pages.write(start, k[:, start:stop], v[:, start:stop])
        start = stop
    return pages


@pytest.mark.parametrize("seen", [
    Seen(ROWS - 5, UNLIMITED, 0), Seen(ROWS - 5, 300, 0), Seen(ROWS - 5, 2, 0),
    Seen(0, UNLIMITED, 0), Seen(-3, UNLIMITED, 0), Seen(-9, UNLIMITED, 1),
    Seen(ROWS + 100, 102, 0), Seen(ROWS + 999, 9, 0), Seen(300, 60, 70),
    Seen(ROWS - 5, UNLIMITED, UNLIMITED),
])  # fmt: skip
def test_page_boundaries_do_not_change_bits(seen):
    q, k, v = drawn(ROWS, 5)
    out, lse = written(k, v, ROWS).attend(q, ROWS, seen, SCORES)
    for x, y in zip((out, lse), attention(q, k, v, seen), strict=True):
        torch.testing.assert_close(x.double(), y, atol=1e-6, rtol=1e-6)
    again = written(k, v, 1, 255, 300, 699, ROWS).attend(q, ROWS, seen, SCORES)
    assert out.equal(again[0]) and lse.equal(again[1])


@pytest.mark.parametrize("rows", [0, 1, 256, 257, 512, 5000, 70000])
def test_pages_hold_at_most_twice_the_rows(rows):
    shape = RowShape(torch.bfloat16, 1, 1, 3, 5)
    assert shape.row_bytes == 16 and rows <= shape.nbytes(rows) / 16 <= max(256, 2 * rows)
    pages = Pages(shape, CPU)
    pages.reserve(rows)
    assert pages.nbytes == shape.nbytes(rows)
    k, v = pages.read(0, rows)
    assert k.shape == (1, rows, 1, 3) and v.shape == (1, rows, 1, 5)


def step(rows, queries=2, cache=1, writes=0, start=0, **changes):
    """A step that adds so many rows; its header has these changes."""
    operands, seen = drawn(rows, queries), Seen(start + rows - queries, UNLIMITED, 0)
    packed = pack_step(cache, writes, start, operands, seen, SCORES)
    return msgspec.structs.replace(packed.header, **changes), packed.parts


def admit(caches, client, header, parts):
    return caches.admit(Peer(client), header, [x.tobytes() for x in parts])


def test_steps_continue_what_is_there_and_nothing_else():
    caches = Caches(2**20, CPU, "default")
    (_, k, v), (q, new_k, new_v) = drawn(9, 2), drawn(3, 2)
    admit(caches, b"a", *step(9)).compute()
    found = admit(caches, b"a", *step(3, writes=1, start=7)).compute()  # two are dropped
    k, v = torch.cat([k[:, :7], new_k], 1), torch.cat([v[:, :7], new_v], 1)
    expected = attention(q, k, v, Seen(8, UNLIMITED, 0))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, atol=1e-6, rtol=1e-6)
    before = caches.nbytes
    for client, change in (
        (b"a", {"writes": 1}), (b"a", {"writes": 3}), (b"a", {"writes": 2, "start": 11}),
        (b"a", {"cache": 2, "writes": 2}), (b"b", {"writes": 2, "start": 10}),
        (b"b", {"writes": 0, "start": 10}),
    ):  # fmt: skip
        with pytest.raises(CacheLost):
            admit(caches, client, *step(3, **change))
    for change, said in (
        ({"dtype": "bfloat16"}, "heads|k must|q must"), ({"checksum": 1}, "checksum"),
        ({"offset": 2**31}, "offset"), ({"kv_heads": 4}, "other heads"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=said):
            admit(caches, b"a", *step(3, **{"writes": 2, "start": 10} | change))
    assert caches.nbytes == before and len(caches) == 1
    admit(caches, b"b", *step(3)).compute()  # of another client, under the same number
    assert len(caches) == 2 and caches.nbytes == 2 * before
    caches.end(Peer(b"a"))
    caches.free(Peer(b"b"), 2)
    assert len(caches) == 1
    caches.free(Peer(b"b"), 1)
    caches.free(Peer(b"b"), 1)
    assert (len(caches), caches.nbytes) == (0, 0)


def test_a_step_after_a_missing_one_fails():
    """Its rows would be memory that may have been another client's."""
    caches = Caches(2**20, CPU, "default")
    steps = [admit(caches, b"a", *step(4, writes=i, start=4 * i)) for i in range(3)]
    with pytest.raises(CacheLost, match="earlier"):
        steps[1].compute()
    steps[0].compute()
    first, again = steps[1].compute(), steps[1].compute()
    assert all(map(torch.equal, first, again))
    steps[2].compute()
    with pytest.raises(CacheLost):
        steps[0].compute()


def test_an_oversized_request_evicts_nothing():
    most = 2 * (SHAPE.nbytes(256) + 4096)
    caches = Caches(most, CPU, "default")
    assert caches.room_of("", False) == most
    for number in (1, 2):
        admit(caches, b"a", *step(9, cache=number)).compute()
    assert caches.room_of("", False) == 0
    admit(caches, b"a", *step(100, writes=1, start=9)).compute()  # in the page that it has
    for changes in ({"cache": 3}, {"writes": 2, "start": 109}):
        with pytest.raises(RequestError, match=r"cache: \d+ bytes more are not free, 0 are"):
            admit(caches, b"a", *step(200, **changes))
    caches.free(Peer(b"a"), 2)
    admit(caches, b"a", *step(200, writes=2, start=109)).compute()
    assert len(caches) == 1 and caches.room_of("", False) == most - SHAPE.nbytes(309) - 4096


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    limits = Limits(tokens=4096, bytes=2**20, queued_bytes=2**22, requests=4, cache_bytes=2**18)
    with running(f"ipc://{tmp_path_factory.mktemp('server')}/s", limits=limits) as server:
        yield server


@pytest.fixture
def client(server):
    with Client(server.address) as client:
        yield client
        client.say(protocol.Goodbye(client.generation))
        wait_until(lambda: not len(server._caches) and not server._caches.nbytes)


def ask(client, header, parts, **changes):
    """Send a step, and hear what the server says."""
    fields = {"generation": client.generation, "request": next(client.numbers)} | changes
    client.say(msgspec.structs.replace(header, **fields), *[x.tobytes() for x in parts])
    return client.hear()


def test_a_server_answers_steps_and_reports_its_caches(server, client):
    assert client.welcome.cache_room == 2**18
    message, frames = ask(client, *step(9))
    pages = written(*drawn(9, 2)[1:], 9)
    expected = pages.attend(drawn(9, 2)[0], 9, Seen(7, UNLIMITED, 0), SCORES)
    data = b"".join(x.tobytes() for x in bytes_of(expected))
    assert isinstance(message, Result) and b"".join(map(bytes, frames)) == data
    status = server.status()
    assert status.caches == 1 and status.cache_bytes == SHAPE.nbytes(9) + 4096
    client.say(Free(client.generation, 1))
    client.say(Free(client.generation, 1))
    message, _ = ask(client, *step(3, writes=1, start=9))
    assert isinstance(message, Lost)


@pytest.mark.parametrize(("changes", "said"), [
    ({"k_rows": 4097}, "k_rows"), ({"batch": 0}, "batch"), ({"heads": 3}, "multiple"),
    ({"dim": 9}, "q must have"), ({"q_rows": 3}, "q must have"), ({"k_rows": 4}, "k must have"),
    ({"checksum": 3}, "checksum"), ({"start": 2**31, "writes": 1}, "start"),
    ({"offset": -(2**31)}, "offset"), ({"scale": float("inf")}, "scale"), ({"place": 0}, "place"),
    ({"k_rows": 2048, "kv_heads": 1024, "dim": 1024, "heads": 1024}, "payload"),
])  # fmt: skip
def test_a_step_with_other_promises_is_refused(client, changes, said):
    message, frames = ask(client, *step(3, **changes))
    assert isinstance(message, Failed) and not frames
    assert re.search(said, message.reason), message.reason
    assert isinstance(ask(client, *step(3))[0], Result)
    client.say(Free(client.generation, 1))


def test_caches_are_their_leases(client):
    for generation in (client.generation, client.generation - 1):
        message, _ = ask(client, *step(3), generation=generation)
        assert isinstance(message, Result if generation == client.generation else protocol.Stale)
    with Client(client.address) as other:
        assert isinstance(ask(other, *step(3, writes=1, start=3))[0], Lost)
        other.say(protocol.Goodbye(other.generation))
    client.say(protocol.Hello("0.1.0", "test", ["zmq"], []))
    client.generation = client.hear()[0].generation
    assert isinstance(ask(client, *step(3, writes=1, start=3))[0], Lost)


def test_a_cancelled_step_is_never_taken_for_done(client, server, monkeypatch):
    gate = Gate(monkeypatch)
    assert isinstance(ask(client, *step(3))[0], Result)
    task = pack(random_request(0))
    client.say(task.numbered(client.generation, 50), *[x.tobytes() for x in task.parts])
    gate.begun.wait(20)
    for number, (header, parts) in (
        (51, step(3, writes=1, start=3)),
        (52, step(3, writes=2, start=6)),
    ):
        header = msgspec.structs.replace(header, generation=client.generation, request=number)
        client.say(header, *[x.tobytes() for x in parts])
    client.say(protocol.Cancel(client.generation, 51))
    message, _ = client.hear()
    assert message == Failed(client.generation, 51, "it was cancelled")
    gate.open.set()
    answers = {message.request: message for message, _ in (client.hear(), client.hear())}
    assert isinstance(answers[50], Result)
    assert answers[52].reason == "the computation failed: CacheLost"


@pytest.mark.parametrize("word", [True, False])
def test_caches_of_clients_that_leave_are_freed(tmp_path, word):
    deadlines = ServerDeadlines(idle=0.3)
    with running(f"ipc://{tmp_path}/s", deadlines=deadlines) as server:
        with Client(server.address) as client:
            assert isinstance(ask(client, *step(3))[0], Result)
            assert server.status().caches == 1
            if word:
                client.say(protocol.Goodbye(client.generation))
                wait_until(lambda: not server.status().caches)
        wait_until(lambda: not server.status().caches and not server.status().cache_bytes)

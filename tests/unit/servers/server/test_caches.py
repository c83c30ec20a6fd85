"""A server's caches: what continues them, what is lost, and what is refused by name."""

import dataclasses
import re

import pytest
import torch
from grpc import StatusCode

from seqpar.core.ranges import UNLIMITED
from seqpar.servers.server import account
from seqpar.servers.server.caches import CacheLost, Caches
from seqpar.servers.wire.codec import pack, pack_step
from seqpar.servers.wire.limits import Limits
from seqpar.servers.wire.messages import Step, Task
from seqpar.servers.wire.pages import Pages, RowShape, Seen
from seqpar.servers.wire.payload import RequestError
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
    of_task = {x: changes.pop(x) for x in list(changes) if x in Task.__dataclass_fields__}
    of_step = {x: changes.pop(x) for x in list(changes) if x in Step._fields}
    return dataclasses.replace(
        packed,
        task=dataclasses.replace(packed.task, **of_task),
        step=packed.step._replace(**of_step),
        **changes,
    )


def peer(session, name=""):
    return account.Client(session, name)


def admit(caches, session, packed):
    parts = [x.tobytes() for x in packed.parts]
    return caches.admit(peer(session), packed.task, packed.step, parts)


def test_steps_continue_what_is_there_and_nothing_else():
    caches = Caches(2**20, CPU, "default")
    (_, k, v), (q, new_k, new_v) = drawn(9, 2), drawn(3, 2)
    admit(caches, b"a", step(9)).compute()
    found = admit(caches, b"a", step(3, writes=1, start=7)).compute()  # two are dropped
    k, v = torch.cat([k[:, :7], new_k], 1), torch.cat([v[:, :7], new_v], 1)
    expected = attention(q, k, v, Seen(8, UNLIMITED, 0))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, atol=1e-6, rtol=1e-6)
    before = caches.account.held
    for session, change in (
        (b"a", {"writes": 1}), (b"a", {"writes": 3}), (b"a", {"writes": 2, "start": 11}),
        (b"a", {"cache": 2, "writes": 2}), (b"b", {"writes": 2, "start": 10}),
        (b"b", {"writes": 0, "start": 10}),
    ):  # fmt: skip
        with pytest.raises(CacheLost):
            admit(caches, session, step(3, **change))
    for change, said in (({"offset": 2**31}, "offset"), ({"kv_heads": 4}, "heads or head dim")):
        with pytest.raises(RequestError, match=said):
            admit(caches, b"a", step(3, **{"writes": 2, "start": 10} | change))
    assert caches.account.held == before and len(caches) == 1
    admit(caches, b"b", step(3)).compute()  # of another session, under the same number
    assert len(caches) == 2 and caches.account.held == 2 * before
    caches.end(peer(b"a"))
    caches.free(peer(b"b"), 2)
    assert len(caches) == 1
    caches.free(peer(b"b"), 1)
    caches.free(peer(b"b"), 1)
    assert (len(caches), caches.account.held) == (0, 0)


def test_another_name_has_no_cache_of_a_session():
    caches, first, second = Caches(2**20, CPU, "default"), step(9), step(3, writes=1, start=9)
    parts = [x.tobytes() for x in first.parts]
    caches.admit(peer(b"session", "a"), first.task, first.step, parts)
    with pytest.raises(CacheLost):
        caches.admit(peer(b"session", "b"), second.task, second.step, parts)
    caches.end(peer(b"session", "b"))
    assert len(caches) == 1


def test_room_for_caches_takes_no_look_at_each(monkeypatch):
    """A client may have a million small caches, and each event says what room is left."""
    caches, first, most = Caches(2**20, CPU, "default"), step(9), 2**20
    parts, peers = [x.tobytes() for x in first.parts], [peer(b"1", "a"), peer(b"2", "a")]
    for each in (*peers, peer(b"3", "b")):
        caches.admit(each, first.task, first.step, parts)
    each, free = caches.account.held // 3, most - caches.account.held
    with monkeypatch.context() as patch:
        patch.setattr(caches, "_caches", None)
        assert caches.account.room_of("a") == (free - 2 * each) // 2
        assert caches.account.room_of("b") == (free - each) // 2
        assert caches.account.room_of("c") == free
    for each in (*peers, peer(b"3", "b")):
        caches.end(each)
    assert caches.account.held == 0 and caches.account.room_of("a") == most


def test_a_step_after_a_missing_one_fails():
    """Its rows would be memory that may have been another client's."""
    caches = Caches(2**20, CPU, "default")
    steps = [admit(caches, b"a", step(4, writes=i, start=4 * i)) for i in range(3)]
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
    assert caches.account.room_of("") == most
    for number in (1, 2):
        admit(caches, b"a", step(9, cache=number)).compute()
    assert caches.account.room_of("") == 0
    admit(caches, b"a", step(100, writes=1, start=9)).compute()  # in the page that it has
    for changes in ({"cache": 3}, {"writes": 2, "start": 109}):
        with pytest.raises(RequestError, match=r"needs \d+ more bytes, and 0 are free"):
            admit(caches, b"a", step(200, **changes))
    caches.free(peer(b"a"), 2)
    admit(caches, b"a", step(200, writes=2, start=109)).compute()
    assert len(caches) == 1 and caches.account.room_of("") == most - SHAPE.nbytes(309) - 4096


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    limits = Limits(tokens=4096, bytes=2**20, queued_bytes=2**22, requests=4, cache_bytes=2**18)
    with running(f"ipc://{tmp_path_factory.mktemp('server')}/s", limits=limits) as server:
        yield server


@pytest.fixture
def client(server):
    with Client(server.address) as client:
        yield client
    wait_until(lambda: not server.status().caches and not server.status().cache_bytes)


def is_computed(client, packed):
    """Whether a step has a result."""
    return isinstance(client.ask(packed), list)


def test_a_server_answers_steps_and_reports_its_caches(server, client):
    assert client.event().state.cache_room == 2**18
    found = client.ask(step(9))
    pages = written(*drawn(9, 2)[1:], 9)
    expected = pages.attend(drawn(9, 2)[0], 9, Seen(7, UNLIMITED, 0), SCORES)
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)
    status = server.status()
    assert status.caches == 1 and status.cache_bytes == SHAPE.nbytes(9) + 4096
    assert client.free(1) == client.free(1) == StatusCode.OK
    assert client.ask(step(3, writes=1, start=9)) == StatusCode.NOT_FOUND


@pytest.mark.parametrize(("changes", "said"), [
    ({"k_rows": 4097}, "k_rows"), ({"batch": 0}, "batch"), ({"heads": 3}, "multiple"),
    ({"dim": 9}, "payload: its last"), ({"q_rows": 1}, "payload: .* bytes were missing"),
    ({"dtype": "bfloat16"}, "payload: .* bytes were missing"),
    ({"checksum": 3}, "checksum"), ({"start": 2**31, "writes": 1}, "start"),
    ({"offset": -(2**31)}, "offset"), ({"scale": float("inf")}, "scale"),
    ({"k_rows": 2048, "kv_heads": 1024, "dim": 1024, "heads": 1024}, "payload"),
])  # fmt: skip
def test_a_step_with_other_promises_is_refused(client, changes, said):
    code, reason = client.refusal(step(3, **changes))
    assert code == StatusCode.INVALID_ARGUMENT and re.search(said, reason), reason
    assert is_computed(client, step(3))
    assert client.free(1) == StatusCode.OK


def test_caches_are_their_sessions(server, client):
    assert is_computed(client, step(3))
    later = step(3, writes=1, start=3)
    with Client(server.address) as other:
        assert other.ask(later) == StatusCode.NOT_FOUND
        assert is_computed(other, step(3))
        assert other.free(1) == StatusCode.OK
    assert is_computed(client, later)


def test_a_cancelled_step_is_never_taken_for_done(client, server, monkeypatch):
    gate = Gate(monkeypatch)
    assert is_computed(client, step(3))
    task = pack(random_request(0))
    first = client.begin(task)
    assert gate.begun.wait(20)
    steps = [step(3, writes=1, start=3), step(3, writes=2, start=6)]
    calls = []
    for number, each in enumerate(steps, 1):
        calls.append(client.begin(each))
        wait_until(lambda: server.status().waiting == number)  # noqa: B023
    calls[0].cancel()
    wait_until(lambda: server.status().waiting == 1)
    gate.open.set()
    assert isinstance(client.hear(first, task), list)
    assert client.hear(calls[1], steps[1]) == StatusCode.NOT_FOUND


@pytest.mark.parametrize("word", [True, False])
def test_caches_of_clients_that_leave_are_freed(server, word):
    with Client(server.address) as client:
        assert is_computed(client, step(3))
        assert server.status().caches == 1
        if word:
            client.session_call.cancel()
            wait_until(lambda: not server.status().caches)
            assert client.ask(step(3)) == StatusCode.FAILED_PRECONDITION
    wait_until(lambda: not server.status().caches and not server.status().cache_bytes)

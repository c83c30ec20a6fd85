"""Calls that have one task after another."""

import asyncio
import contextlib
import queue
import time

import pytest
from grpc import StatusCode

from seqpar.servers.pool import connection
from seqpar.servers.pool.connection import TaskCall
from seqpar.servers.server import service
from seqpar.servers.server.service import Service
from seqpar.servers.wire.codec import pack
from seqpar.servers.wire.messages import ReplyHeader
from seqpar.servers.wire.payload import RequestError
from seqpar.servers.wire.versions import Version
from tests.support.requests import random_request
from tests.support.servers import LONG_DEADLINES, Client, Gate, connect, running, same, wait_until

REQUEST = random_request(0)
PACKED = pack(REQUEST)


class Requests:
    """The requests of a call, which a test sends one by one."""

    def __init__(self):
        self.queue = queue.SimpleQueue()

    def __iter__(self):
        return iter(self.queue.get, None)


class Open:
    """A call of a client that breaks the rules if a test wants it to."""

    def __init__(self, client):
        self.client, self.requests = client, Requests()
        self.call = client.compute(self.requests)

    def send(self, session=None):
        for x in self.client.requests(PACKED.header(session or self.client.session), PACKED.parts):
            self.requests.queue.put(x)

    def hear(self):
        """Whether the call may have another task; the task has one reply."""
        reply, data = self.client.version.read_reply(next(self.call))
        assert len(data) == sum(PACKED.form.result.sizes)
        return reply.open

    def close(self):
        self.requests.queue.put(None)
        self.call.cancel()


@pytest.fixture
def server(tmp_path):
    with running(f"ipc://{tmp_path}/s") as server:
        yield server


@pytest.fixture
def opened(server):
    """A function that makes calls of a client, which end with the test."""
    with Client(server.address) as client, contextlib.ExitStack() as stack:
        client.open = lambda: stack.enter_context(contextlib.closing(Open(client)))
        yield client


def calls_of(server):
    return [len(session.calls) for session in server._service.sessions]


def test_tasks_of_a_pool_follow_one_another_in_one_call(server):
    with connect(server.address, depth=1, home=False) as pool:
        for _ in range(3):
            assert same(pool.submit(REQUEST).result(20), REQUEST)
            assert calls_of(server) == [1]
            wait_until(lambda: server._service.account.held == 0)
    wait_until(lambda: not server._service._open_calls)


def test_a_pool_makes_a_new_call_long_before_the_deadline(server, monkeypatch):
    monkeypatch.setattr(connection, "_MAX_OPEN_SECONDS", 0.0)
    with connect(server.address, depth=1, home=False) as pool:
        for _ in range(3):
            assert same(pool.submit(REQUEST).result(20), REQUEST)
        wait_until(lambda: calls_of(server) == [1])


def test_a_pool_ends_calls_that_rest_for_long(server, monkeypatch):
    with connect(server.address, depth=2, home=False) as pool:
        gate = Gate(monkeypatch)
        futures = [pool.submit(REQUEST) for _ in range(2)]
        wait_until(lambda: calls_of(server) == [2])
        gate.open.set()
        assert all(same(x.result(20), REQUEST) for x in futures)
        assert same(pool.submit(REQUEST).result(20), REQUEST)
        assert calls_of(server) == [2]
        monkeypatch.setattr(connection, "_MAX_REST_SECONDS", 0.0)
        wait_until(lambda: calls_of(server) == [0])
        assert same(pool.submit(REQUEST).result(20), REQUEST)


def test_few_calls_of_a_name_may_have_several_tasks(server, opened):
    calls = [opened.open() for _ in range(service._OPEN_CALLS + 1)]
    for call in calls:
        call.send()
    assert sorted(call.hear() for call in calls) == [False] + [True] * service._OPEN_CALLS
    wait_until(lambda: server._service.account.held == 0)
    calls[0].close()
    wait_until(lambda: sum(calls_of(server)) == service._OPEN_CALLS - 1)
    (again := opened.open()).send()
    assert again.hear()


def test_few_calls_of_all_names_may_have_several_tasks(opened, monkeypatch):
    monkeypatch.setattr(service, "_ALL_OPEN_CALLS", 3)
    calls = [opened.open() for _ in range(4)]
    for call in calls:
        call.send()
    assert sorted(call.hear() for call in calls) == [False, True, True, True]


def test_an_open_call_ends_with_its_session(opened):
    (call := opened.open()).send()
    assert call.hear()
    opened.session_call.cancel()
    with pytest.raises(Exception, match="session: it has ended"):
        next(call.call)
    assert call.call.code() == StatusCode.FAILED_PRECONDITION


def test_an_open_call_belongs_to_one_session(server, opened):
    with Client(server.address) as other:
        (call := opened.open()).send()
        assert call.hear()
        call.send(other.session)
        with pytest.raises(Exception, match="must be of one session"):
            next(call.call)


def test_an_open_call_does_not_wait_for_calls_that_say_nothing(opened):
    (call := opened.open()).send()
    assert call.hear()
    silent = [opened.open() for _ in range(20)]
    time.sleep(0.2)  # until the server has them
    before = time.monotonic()
    call.send()
    assert call.hear()
    assert time.monotonic() - before < 2
    assert all(x.call.is_active() for x in silent)


class Stream:
    """Stands in for a call of gRPC."""

    def __init__(self):
        self.messages, self.cancelled = asyncio.Queue(), False
        self.written = asyncio.Event()

    async def write(self, message):
        await self.written.wait()

    async def read(self):
        if isinstance(message := await self.messages.get(), Exception):
            raise message
        return message

    def cancel(self):
        self.cancelled = True


@pytest.mark.parametrize("message", [b"too early", ValueError("the call has ended")])
def test_a_call_ends_if_its_server_sends_before_it_is_asked(message):
    async def check():
        call = TaskCall(stream := Stream())
        call.rest()
        await asyncio.sleep(0)
        assert call.resume()
        stream.messages.put_nowait(b"an answer")
        assert await call.read() == b"an answer" and not stream.cancelled
        call.rest()
        stream.messages.put_nowait(message)
        for _ in range(5):
            await asyncio.sleep(0)
        assert stream.cancelled and not call.resume()

    asyncio.run(check())


@pytest.mark.parametrize("first", ["read", "written"])
def test_a_reply_may_arrive_before_its_request_is_written(first):
    """In one pass of the event loop, in either order."""

    async def check():
        async def exchange():
            await call.write(b"a task")
            answer = await call.read()
            call.rest()
            return answer

        call = TaskCall(stream := Stream())
        call.rest()
        await asyncio.sleep(0)
        assert call.resume()
        task = asyncio.create_task(exchange())
        await asyncio.sleep(0)
        if first == "read":
            stream.messages.put_nowait(b"an answer")
            stream.written.set()
        else:
            stream.written.set()
            stream.messages.put_nowait(b"an answer")
        assert await task == b"an answer"
        for _ in range(5):
            await asyncio.sleep(0)
        assert not stream.cancelled and call.resume()

    asyncio.run(check())


def test_a_repeated_reply_is_no_answer_to_the_next_task(server, monkeypatch):
    """The server sends the first reply of a call again, for a task of the same shapes."""
    encode, sent = Version.reply, []

    def repeats(version, header, data):
        sent.append(encode(version, header, data))
        return sent[0]

    monkeypatch.setattr(Version, "reply", repeats)
    following = random_request(1)
    assert pack(following).form.result.sizes == PACKED.form.result.sizes
    with connect(server.address, depth=1, deadlines=LONG_DEADLINES) as pool:
        assert same(pool.submit(REQUEST).result(20), REQUEST)
        assert same(pool.submit(following).result(20), following)
        assert pool.report().retried == 1 and len(sent) == 2


def test_an_early_reply_to_a_later_task_loses_no_time(server, monkeypatch):
    """The server answers the first task of a call, and replies to the second before it has it."""
    answers = Service._answer

    async def answer(self, version, session, header, data, is_open, context):
        if not server.totals.tasks:
            return await answers(self, version, session, header, data, is_open, context)
        await context.write(version.reply(ReplyHeader(0, 0.0, True), [b"x"]))
        await asyncio.sleep(0.2)  # until the reply has arrived
        await self._receive(session.client.name, header, data, context)
        raise RequestError("no more")

    monkeypatch.setattr(Service, "_answer", answer)
    large = random_request(1, 2**14, 64, dim=64)
    with connect(server.address, depth=1, deadlines=LONG_DEADLINES) as pool:
        assert same(pool.submit(REQUEST).result(20), REQUEST)
        assert same(pool.submit(large).result(40), large)
        assert pool.report().retried == 1

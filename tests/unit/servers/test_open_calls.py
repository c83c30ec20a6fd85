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
from seqpar.servers.wire.codec import pack
from tests.support.requests import random_request
from tests.support.servers import Client, connect, running, same, wait_until

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
        assert call.may_go_on()
        stream.messages.put_nowait(b"an answer")
        assert await call.read() == b"an answer" and not stream.cancelled
        call.rest()
        stream.messages.put_nowait(message)
        for _ in range(5):
            await asyncio.sleep(0)
        assert stream.cancelled and not call.may_go_on()

    asyncio.run(check())

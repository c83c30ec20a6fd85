"""Attention servers for tests: in a thread of this process, or in a process that may be killed."""

import builtins
import contextlib
import dataclasses
import os
import signal
import threading
import time
from pathlib import Path

import grpc
import pytest
import torch

from seqpar.servers.pool.pool import ServerPool
from seqpar.servers.server import caches, worker
from seqpar.servers.server import server as server_module
from seqpar.servers.server.compute import compute
from seqpar.servers.server.server import Server
from seqpar.servers.transport.certificates import ServerIdentity
from seqpar.servers.transport.options import open_blocking_channel
from seqpar.servers.transport.routes import Route
from seqpar.servers.wire import versions
from seqpar.servers.wire.limits import ServerDeadlines
from seqpar.servers.wire.messages import Task
from seqpar.servers.wire.payload import Incoming, chunks
from seqpar.servers.wire.versions import data_of, joined
from tests.support.faults import LIMIT
from tests.support.processes import PROCESSES

CPU = torch.device("cpu")
DEADLINES = {"connect": 1.0, "request": 2.0, "hedge": 10.0, "give_up": 20.0}
# For tests in which no deadline may pass, even on a busy machine.
LONG_DEADLINES = {"connect": 60.0, "request": 65.0, "hedge": 70.0, "give_up": 80.0}


def expected(request):
    """Return the answer that a request must get, bit for bit."""
    return compute([request], CPU)[0]


def same(got, request):
    """Whether an answer has the right bits."""
    return all(torch.equal(x, y) for x, y in zip(got, expected(request), strict=True))


def connect(*addresses, transports=("grpc",), deadlines=(), **options):
    """Make a pool with deadlines that suit tests."""
    within = DEADLINES | dict(deadlines)
    options = {"home_depth": 0} | options
    return ServerPool.connect(addresses, transports=transports, deadlines=within, **options)


class ComputingThreads:
    """The threads that a server starts when it needs them, to compute short tasks."""

    def __init__(self, worker):
        self.worker = worker

    def __contains__(self, thread):
        return thread in self.worker._threads[False].threads


@contextlib.contextmanager
def running(address, **options):
    """Within this context, run a server in a thread. The server must end with the context.

    The `threads` of the server are a `ComputingThreads`.
    """
    server = Server(address, **options)
    thread = threading.Thread(target=server.run, daemon=True)
    server.threads = ComputingThreads(server.worker)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(LIMIT)
        assert not thread.is_alive(), "the server does not end"


def _serve(address, pipe, options):
    """Run in the process of a server; the server ends with the test."""
    from seqpar.commands.serve import serve

    torch.set_num_threads(1)
    if slow := options.pop("slow", 0.0):
        slow_down(slow)
    if file := options.pop("held_by", None):
        hold_while(file)
    if wrong := options.pop("fails", None):
        fail_at(*wrong)
    if library := options.pop("library", None):
        server_module.library_version = lambda: library
    if speaks := options.pop("versions", None):
        versions.VERSIONS[:] = speaks()
    if folder := options.pop("keys", None):
        options["keys"] = ServerIdentity(folder)
    server = Server(address, **options)
    pipe.send(server.address)
    serve(server)


def slow_down(seconds):
    """Delay each fused call of this process, and each step of a cache, by this many seconds."""
    worker.compute = lambda *arguments: (time.sleep(seconds), compute(*arguments))[1]
    step = caches.CacheStep.compute
    caches.CacheStep.compute = lambda self: (time.sleep(seconds), step(self))[1]


def hold_while(file):
    """Let each fused call of this process wait while the file exists; `wait_for_calls` sees it."""
    computes, waiting = worker.compute, waiting_in(file.parent, os.getpid())

    def waits(requests, device):
        while file.exists():
            waiting.touch()
            time.sleep(0.01)
        waiting.unlink(missing_ok=True)
        return computes(requests, device)

    worker.compute = waits


def fail_at(name, q_rows, k_rows):
    """Let this process raise an error of this name at tasks with so many rows of queries and
    keys."""
    computes = worker.compute

    def fails(requests, device):
        if any((x.q.shape[1], x.k.shape[1]) == (q_rows, k_rows) for x in requests):
            raise getattr(builtins, name)("no data of anybody's")
        return computes(requests, device)

    worker.compute = fails


class ServerProcess:
    """A server in a new process."""

    def __init__(self, address, **options):
        ours, theirs = PROCESSES.Pipe(duplex=False)
        self.process = PROCESSES.Process(
            target=_serve, args=(address, theirs, options), daemon=True
        )
        self.process.start()
        theirs.close()
        self.pipe = ours

    @property
    def address(self):
        """The address of the server, as soon as it serves."""
        if not hasattr(self, "_address"):
            assert self.pipe.poll(LIMIT), "the server does not start"
            self._address = self.pipe.recv()
        return self._address

    def signal(self, name):
        """Send the server a signal, by its name."""
        os.kill(self.process.pid, getattr(signal, name))

    def end(self):
        self.process.kill()
        self.process.join(LIMIT)


@contextlib.contextmanager
def processes(tmp_path, count, **options):
    """Within this context, run `count` servers in new processes, on Unix sockets. See `held`."""
    options = {"held_by": tmp_path / "held"} | options
    servers = [ServerProcess(f"ipc://{tmp_path}/{i}", **options) for i in range(count)]
    try:
        assert all(server.address for server in servers)
        yield servers
    finally:
        for server in servers:
            server.end()


@contextlib.contextmanager
def held(tmp_path):
    """Within this context, servers of `processes` begin to compute their tasks, but do not end."""
    (tmp_path / "held").touch()
    try:
        yield
    finally:
        (tmp_path / "held").unlink()


def waiting_in(tmp_path, pid):
    """Return the file that exists while a call of the server waits."""
    return tmp_path / f"waiting-{pid}"


def wait_for_calls(tmp_path, servers):
    """Wait until each of these servers, which are `held`, has begun to compute."""
    files = [waiting_in(tmp_path, server.process.pid) for server in servers]
    wait_until(lambda: all(file.exists() for file in files))


class Client:
    """A client that calls the service by hand, and may break the service's rules."""

    def __init__(self, address, keys=None, version=None, **hello):
        """`keys` is a ClientIdentity; `hello` are fields of the session's request."""
        self.version = version or versions.VERSIONS[0]
        self.address, self.route = address, Route(address, keys is not None)
        self.channel = open_blocking_channel(self.route, keys, LIMIT)
        request = self.message("SessionRequest", **{"library": "0.1.0", "client": "test"} | hello)
        session = self.channel.unary_stream(f"/{self.version.service}/Session")
        self.session_call = session(request, timeout=LIMIT, wait_for_ready=True)
        self.welcome = self.event().welcome
        self.session = self.welcome.session

    def message(self, name, **fields):
        """Return an encoded message of this name."""
        return getattr(self.version.messages, name)(**fields).SerializeToString()

    def event(self):
        """Return the next event of the session, or raise a grpc.RpcError if the session has
        ended."""
        return self.version.messages.SessionEvent.FromString(next(self.session_call))

    def wait_for_end(self):
        """Read events until the session ends; return its status code."""
        with contextlib.suppress(grpc.RpcError):
            for _ in self.session_call:
                pass
        return self.session_call.code()

    def compute(self, requests, timeout=LIMIT):
        """Begin a call with these encoded requests; return the call, an iterator of replies."""
        call = self.channel.stream_stream(f"/{self.version.service}/Compute")
        return call(iter(requests), timeout=timeout)

    def begin(self, packed, *, timeout=LIMIT, session=None, **changes):
        """Begin a call for a request, with some fields of its header or its task changed."""
        header = packed.header(self.session if session is None else session)
        of_task = {x: changes.pop(x) for x in list(changes) if x in Task.__dataclass_fields__}
        task = dataclasses.replace(header.task, **of_task)
        header = header._replace(task=task, **changes)
        return self.compute(self.requests(header, packed.parts), timeout)

    def requests(self, header, parts):
        """Yield the encoded requests of a call."""
        pieces = chunks(parts)
        yield self.version.request(header, next(pieces, ()))
        for piece in pieces:
            yield joined(b"", piece)

    def ask(self, packed, **changes):
        """Make a call for a request; return the tensors of its result, or a status code."""
        return self.hear(self.begin(packed, **changes), packed)

    def hear(self, call, packed):
        """Return the tensors that a call returns, or the status code with which it fails."""
        try:
            reply, data = self.version.read_reply(next(call))
            incoming = Incoming(packed.form.result)
            incoming.take(data)
            for more in call:
                incoming.take(data_of(more))
        except grpc.RpcError as error:
            self.details = error.details()
            return error.code()
        assert not incoming.missing
        of_request = self.version.checksum(packed.header(self.session))
        packed.form.result.check(incoming.parts, reply.checksum ^ of_request)
        return packed.form.result.tensors(incoming.parts)

    def refusal(self, packed, **changes):
        """Return the status code and the text with which a call for a request fails."""
        call = self.begin(packed, **changes)
        with pytest.raises(grpc.RpcError):
            list(call)
        return call.code(), call.details()

    def free(self, cache, session=None):
        """Free a cache; return the status code."""
        request = self.message("FreeRequest", session=session or self.session, cache=cache)
        free = self.channel.unary_unary(f"/{self.version.service}/Free")
        try:
            return free.with_call(request, timeout=LIMIT)[1].code()
        except grpc.RpcError as error:
            return error.code()

    def failure(self, name, request):
        """Return the status code and the text with which a call of one encoded message fails."""
        call = self.channel.stream_stream(f"/{self.version.service}/{name}")
        call = call(iter([request]), timeout=LIMIT)
        with pytest.raises(grpc.RpcError):
            list(call)
        return call.code(), call.details()

    def status(self):
        """Return the message with the server's numbers."""
        ask = self.channel.unary_unary(f"/{self.version.service}/Status")
        return self.version.messages.StatusReply.FromString(ask(b"", timeout=LIMIT))

    def close(self):
        """Close the connection without telling the server."""
        self.channel.close()
        self.route.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


QUICK = ServerDeadlines(idle=1.0, request=3.0, handshake=1.0, transfer=2.0, drain=5.0)


class Gate:
    """Blocks computing until the gate is opened."""

    def __init__(self, monkeypatch):

        self.open, self.begun = threading.Event(), threading.Event()
        self.calls = []
        monkeypatch.setattr(worker, "compute", self)

    def __call__(self, requests, device):
        self.calls.append(len(requests))
        self.begun.set()
        self.open.wait(20)
        return compute(requests, device)


class Slow:
    """Makes the calls of at most one server slow."""

    def __init__(self, monkeypatch, seconds):
        self.threads, self.seconds = (), seconds
        monkeypatch.setattr(worker, "compute", self)

    def __call__(self, requests, device):
        if threading.current_thread() in self.threads:
            time.sleep(self.seconds)
        return compute(requests, device)


def usage(pid):
    """Return the number of descriptors, threads and bytes of memory of a process."""
    proc = Path(f"/proc/{pid}")
    pages = int((proc / "statm").read_text().split()[1])
    counts = [len(list((proc / name).iterdir())) for name in ("fd", "task")]
    return *counts, pages * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid):
    """Return the CPU time of a process in seconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def wait_until(condition, seconds=20.0):
    """Wait until a condition holds; fail if it does not hold within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)

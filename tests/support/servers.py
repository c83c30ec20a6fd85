"""Attention servers for tests: in a thread of this process, or in a process that may be killed."""

import builtins
import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import torch
import zmq

from seqpar.servers.pool.pool import ServerPool
from seqpar.servers.server import caches, clients, worker
from seqpar.servers.server.compute import compute
from seqpar.servers.server.server import Server
from seqpar.servers.transport.sockets import secure
from seqpar.servers.transport.zeromq import Frames
from seqpar.servers.wire import protocol
from seqpar.servers.wire.limits import ServerDeadlines
from seqpar.servers.wire.payload import bytes_of, checksum
from seqpar.servers.wire.protocol import decode, encode, library_version
from tests.support.faults import LIMIT
from tests.support.processes import PROCESSES

CPU = torch.device("cpu")
DEADLINES = {"connect": 1.0, "request": 2.0, "hedge": 10.0, "give_up": 20.0}


def expected(request):
    """What a request's answer is, bit for bit."""
    return compute([request], CPU)[0]


def same(got, request):
    """Whether an answer has the right bits."""
    return all(torch.equal(x, y) for x, y in zip(got, expected(request), strict=True))


def connect(*addresses, transports=("zmq",), deadlines=(), **options):
    """A pool with deadlines for tests."""
    within = DEADLINES | dict(deadlines)
    options = {"home_depth": 0} | options
    return ServerPool.connect(addresses, transports=transports, deadlines=within, **options)


class ComputingThreads:
    """The threads that compute a server's short tasks, which it starts when it needs them."""

    def __init__(self, receiving, worker):
        self.receiving, self.worker = receiving, worker

    def __contains__(self, thread):
        return thread in (self.receiving, *self.worker._threads[False].threads)


@contextlib.contextmanager
def running(address, **options):
    """A server in a thread; it must have ended when it should. `threads` are those that compute."""
    server = Server(address, **{"transports": ["zmq"]} | options)
    thread = threading.Thread(target=server.run, daemon=True)
    server.threads = ComputingThreads(thread, server._worker)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(LIMIT)
        assert not thread.is_alive(), "the server does not end"


def _serve(address, pipe, options):
    """The main function of a server's process; it ends with the test."""
    from seqpar.commands.serve import serve

    torch.set_num_threads(1)
    if slow := options.pop("slow", 0.0):
        slow_down(slow)
    if wrong := options.pop("fails", None):
        fail_at(*wrong)
    pretend(options.pop("speaks", protocol.VERSION), options.pop("library", library_version()))
    server = Server(address, **{"transports": ["zmq"]} | options)
    pipe.send(server.address)
    serve(server)


def slow_down(seconds):
    """Let every fused call of this process, and every step of a cache, take so much longer."""
    worker.compute = lambda *arguments: (time.sleep(seconds), compute(*arguments))[1]
    step = caches.CacheStep.compute
    caches.CacheStep.compute = lambda self: (time.sleep(seconds), step(self))[1]


def fail_at(name, q_rows, k_rows):
    """Let this process fail at tasks of so many rows, by an error of this name."""
    computes = worker.compute

    def fails(requests, device):
        if any((x.q.shape[1], x.k.shape[1]) == (q_rows, k_rows) for x in requests):
            raise getattr(builtins, name)("no data of anybody's")
        return computes(requests, device)

    worker.compute = fails


def pretend(version, library):
    """Let this process speak another version of the protocol, and be one of seqpar."""
    protocol.VERSION = version
    clients.library_version = lambda: library


class ServerProcess:
    """A server in a process of its own."""

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
        """Where it serves, once it does."""
        if not hasattr(self, "_address"):
            assert self.pipe.poll(LIMIT), "the server does not start"
            self._address = self.pipe.recv()
        return self._address

    def signal(self, name):
        """Send it a signal, by its name."""
        os.kill(self.process.pid, getattr(signal, name))

    def end(self):
        """Kill it."""
        self.process.kill()
        self.process.join(LIMIT)


@contextlib.contextmanager
def processes(tmp_path, count, **options):
    """So many servers in processes of their own, on Unix sockets."""
    servers = [ServerProcess(f"ipc://{tmp_path}/{i}", **options) for i in range(count)]
    try:
        assert all(server.address for server in servers)
        yield servers
    finally:
        for server in servers:
            server.end()


class Client:
    """A client that speaks the protocol by hand, and may break it."""

    def __init__(self, address, keys=None, routing_id=b"", **hello):
        self.address, self.context = address, zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        if routing_id:
            self.socket.routing_id = routing_id
        secure(self.socket, keys)
        self.socket.connect(address)
        self.numbers = iter(range(1, 10**9))
        self.session = bytes(16)
        fields = {"library": "0.1.0", "client": "test", "transports": ["zmq"], "dtypes": []}
        self.say(protocol.Hello(**fields | hello))
        self.welcome, _ = self.hear()
        self.generation = getattr(self.welcome, "generation", 0)

    def say(self, message, *frames):
        """Send a message, or bytes in its place."""
        data = message if isinstance(message, bytes) else encode(message, self.session)
        self.socket.send_multipart([data, *frames])

    def hear(self, limit=LIMIT):
        """The next message that is no sign of life, and its frames."""
        end = time.monotonic() + limit
        while self.socket.poll(max(0, int(1000 * (end - time.monotonic())))):
            data = self.socket.recv()
            frames = [self.socket.recv() for _ in range(protocol.frames_after(data))]
            message = decode(data)
            if isinstance(message, protocol.Welcome):
                self.session = message.secret
            if not isinstance(message, protocol.Pong):
                return message, frames
        raise TimeoutError("the server says nothing")

    def ask(self, packed, **changes):
        """Send a request with some fields of its header changed, and hear the answer."""
        import msgspec

        task = packed.numbered(self.generation, next(self.numbers))
        self.say(msgspec.structs.replace(task, **changes), *[x.tobytes() for x in packed.parts])
        return self.hear()

    def close(self):
        """Leave without a word."""
        self.context.destroy(linger=0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def right_answer(message, frames, request):
    """Whether a result is right."""
    assert isinstance(message, protocol.Result), message
    data = [x.tobytes() for x in bytes_of(expected(request))]
    frames = Frames().read("server", frames, [len(x) for x in data], None)
    return list(frames) == data and message.checksum == checksum(data)


QUICK = ServerDeadlines(idle=1.0, request=3.0, handshake=1.0, transfer=2.0, drain=5.0)


class Gate:
    """Holds up computing until it is opened."""

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
    """Lets the calls of one server, or of none, take long."""

    def __init__(self, monkeypatch, seconds):
        self.threads, self.seconds = (), seconds
        monkeypatch.setattr(worker, "compute", self)

    def __call__(self, requests, device):
        if threading.current_thread() in self.threads:
            time.sleep(self.seconds)
        return compute(requests, device)


def usage(pid):
    """The descriptors, threads and bytes of memory of a process."""
    proc = Path(f"/proc/{pid}")
    pages = int((proc / "statm").read_text().split()[1])
    counts = [len(list((proc / name).iterdir())) for name in ("fd", "task")]
    return *counts, pages * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid):
    """The seconds that the threads of a process have been on a core."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def wait_until(condition, seconds=20.0):
    """Wait until something holds, which it must soon."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)

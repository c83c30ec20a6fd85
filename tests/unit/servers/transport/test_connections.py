"""Connections to a server's socket: which ones it ends, and that none of them ends it."""

import contextlib
import fcntl
import math
import os
import resource
import signal
import socket
import struct
import sys
import termios
import threading
import time

import pytest
import zmq

from seqpar.servers.transport import connections as connections_module
from seqpar.servers.transport.curve_keys import client_keys, generate, server_keys
from seqpar.servers.transport.server_socket import ServerSocket
from seqpar.servers.transport.sockets import secure
from seqpar.servers.wire.limits import PIECE_BYTES, Limits, ServerDeadlines
from tests.support.processes import PROCESSES
from tests.support.servers import wait_until
from tests.support.tiers import few_rows
from tests.support.zmtp import dealer
from tests.unit.servers.server.test_identity import client_folder

IDLE = 0.3  # seconds
SEGMENT_BYTES = 2**16  # that Linux passes on at most as one, between processes of a machine
USER_ID = b"\x07User-Id" + struct.pack(">I", 2) + b"\xc3\x28"  # not UTF-8
MESSAGE = b"\x00\x01x"  # of one byte


def let_a_client_leave(address, leaves):
    """A client leaves while its last message has no room in the server's queue."""
    bound = ServerSocket(address, None, Limits(), ServerDeadlines(idle=IDLE))
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.linger = client.sndhwm = 0
    client.connect(bound.address)
    if leaves == "cut":
        client.send(b"x")
        bound.socket.poll(20_000)
        peer, _ = bound.receive()
        bound.cut(peer)
    else:
        for _ in range(5_000):
            client.send(b"x")
    time.sleep(0.1)
    client.send(b"x")
    time.sleep(0.1)
    client.close()
    time.sleep(0.5)


def exhaust():
    """Silent connections take all descriptors that a server's process may have."""
    bound = ServerSocket("tcp://127.0.0.1:*", None, Limits(), ServerDeadlines(idle=0.5))
    port = int(bound.address.rpartition(":")[2])
    used = len(os.listdir("/proc/self/fd"))
    read, write = os.pipe()
    child = os.fork()
    if not child:
        flood = [socket.create_connection(("127.0.0.1", port)) for _ in range(used + 60)]
        os.write(write, b"x")
        time.sleep(60)
        os._exit(len(flood))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 40, used + 40))
    os.read(read, 1)
    for _ in range(30):
        bound.beat()
        time.sleep(0.1)
    with client(bound):
        pass  # it answers
    os.kill(child, signal.SIGKILL)


def exit_code_of(function, *arguments):
    """Run a function in a process of its own."""
    process = PROCESSES.Process(target=function, args=arguments)
    process.start()
    process.join(60)
    return process.exitcode


@pytest.fixture
def bound():
    deadlines = ServerDeadlines(idle=IDLE)
    with contextlib.closing(ServerSocket("tcp://127.0.0.1:*", None, Limits(), deadlines)) as made:
        yield made


@pytest.fixture
def small():
    """Bound with limits that a test can reach; no connection is silent for too long."""
    limits = Limits(bytes=2**24, queued_bytes=2**24)
    address = "tcp://127.0.0.1:*"
    with contextlib.closing(ServerSocket(address, None, limits, ServerDeadlines(idle=60))) as made:
        yield made


@contextlib.contextmanager
def client(bound, properties=b""):
    """A connection by hand, of which the server has read a message."""
    with dealer(int(bound.address.rpartition(":")[2]), properties) as made:
        made.sendall(MESSAGE)
        assert bound.socket.poll(20_000)
        assert bound.receive() is not None
        yield made


def closed(connection):
    """Whether the server has closed a connection; what it has sent is read."""
    connection.setblocking(False)
    try:
        while connection.recv(2**16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@few_rows()
@pytest.mark.parametrize("leaves", ["cut", "flooding"])
@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_leaving_client_does_not_abort_the_server(tmp_path, transport, leaves):
    """With ZeroMQ's heartbeats it does; the process ends by a signal."""
    address = f"ipc://{tmp_path}/s" if transport == "ipc" else "tcp://127.0.0.1:*"
    assert exit_code_of(let_a_client_leave, address, leaves) == 0


def test_a_silent_connection_is_ended(bound):
    with client(bound) as silent, client(bound) as alive:
        end = time.monotonic() + 20
        while not closed(silent):
            assert time.monotonic() < end, "it goes on"
            alive.sendall(MESSAGE)
            bound.beat()
            while bound.receive() is not None:
                pass
            time.sleep(0.01)
        assert not closed(alive)


def test_an_older_protocol_counts_as_silent(bound):
    """ZMTP 1.0 has no handshake, and ZeroMQ does not tell the descriptor of its messages."""
    port = int(bound.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as old:
        old.sendall(b"\x01\x00" + b"\x02\x00x")
        assert bound.socket.poll(20_000)
        assert bound.receive() is not None
        time.sleep(1.1 * IDLE)
        bound.beat()
        wait_until(lambda: closed(old))


def test_a_long_message_must_advance_by_pieces(bound):
    """A piece within `idle` is enough; a byte now and then is not."""
    header = b"\x02" + struct.pack(">Q", 64 * PIECE_BYTES)
    with client(bound) as quick, client(bound) as slow:
        quick.sendall(header)
        slow.sendall(header)
        piece, end = bytes(PIECE_BYTES), time.monotonic() + 20
        quick.settimeout(20)
        for _ in range(8):
            quick.sendall(piece)
            with contextlib.suppress(OSError):
                slow.sendall(b"x")
            time.sleep(0.75 * IDLE)
            bound.beat()
        assert not closed(quick)
        wait_until(lambda: closed(slow))
        assert time.monotonic() < end


def test_a_cut_connection_passes_nothing(bound):
    with zmq.Context() as context, context.socket(zmq.DEALER) as cut:
        cut.linger = 0
        cut.connect(bound.address)
        cut.send(b"x")
        assert bound.socket.poll(20_000)
        peer, _ = bound.receive()
        bound.cut(peer)
        assert bound.send(peer, [b"answer"]) is None
        cut.send(b"x")  # ZeroMQ connects anew
        assert bound.socket.poll(20_000)
        other, _ = bound.receive()
        assert other != peer
        assert bound.send(other, [b"answer"]) is not None
        assert cut.poll(20_000)


class EndlessEvents:
    """Connections come and leave faster than anybody can read about them."""

    def poll(self, _):
        return True

    def recv_multipart(self, _=0):
        return [struct.pack("=HI", zmq.Event.DISCONNECTED, 2**20), b""]


def test_floods_of_connections_do_not_stall_the_server(bound, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(bound.connections, "_events", EndlessEvents())
        beat = threading.Thread(target=bound.beat, daemon=True)
        beat.start()
        beat.join(20)
        assert not beat.is_alive()


def test_a_pause_of_the_server_ends_no_connection(bound, monkeypatch):
    with client(bound) as waiting:
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 60)
        bound.beat()
        assert not closed(waiting)


def test_a_claimed_user_id_is_ignored(bound):
    """Without keys, since any client may claim one; with keys, ZeroMQ's own one is taken."""
    with client(bound, USER_ID) as liar:
        liar.sendall(MESSAGE)
        assert bound.socket.poll(20_000)
        peer, _ = bound.receive()
        assert peer.key == ""


def send_frames(bound, connection, mebibytes):
    """Send frames of a message that does not end, until all are sent or the server ends it."""
    frame = b"\x03" + struct.pack(">Q", 2**20) + bytes(2**20)
    connection.settimeout(20)
    for _ in range(mebibytes):
        connection.sendall(frame)
        bound.beat()
        time.sleep(0.05)


def test_an_endless_message_is_ended(small):
    with client(small) as endless, client(small) as alive:
        with pytest.raises(OSError):  # noqa: PT011
            send_frames(small, endless, 1000)
        assert not closed(alive)


@pytest.mark.exhaustive
def test_unfinished_messages_have_one_limit(small):
    """The largest one is ended first."""
    with client(small) as large, client(small) as little:
        end = time.monotonic() + 20
        while not closed(large):
            assert time.monotonic() < end, "it goes on"
            with contextlib.suppress(OSError):
                send_frames(small, large, 4)
            send_frames(small, little, 1)
            for _ in range(10):
                small.beat()
                time.sleep(0.1)
        assert not closed(little)


def waiting_bytes(bound, key):
    """How many bytes of a key's connections the system holds until ZeroMQ's next turn."""
    total, connections = 0, bound.connections
    for connection in connections._open_by_key()[key]:
        with connections._socket_of(connection.descriptor) as opened:
            found = fcntl.ioctl(opened, termios.FIONREAD, bytes(4))
        total += int.from_bytes(found, sys.byteorder)
    return total


def test_a_flood_waits_in_small_buffers(tmp_path, monkeypatch):
    """A turn of all connections of a key reads about as much as one of a single connection."""
    folder = generate(tmp_path / "keys")[0].parent
    own, other = client_keys(folder), client_keys(client_folder(folder, "b"))
    limits, data = Limits(requests=1), bytes(2**18)
    with contextlib.ExitStack() as stack:
        bound = ServerSocket("tcp://127.0.0.1:*", server_keys(folder), limits, ServerDeadlines())
        stack.callback(bound.close)
        context = stack.enter_context(zmq.Context())
        clients = [stack.enter_context(context.socket(zmq.DEALER)) for _ in range(16 + 1)]
        poller = zmq.Poller()
        for socket_, keys in zip(clients, [own] + 16 * [other], strict=True):
            socket_.linger, socket_.sndhwm = 0, 1
            secure(socket_, keys)
            socket_.connect(bound.address)
            socket_.send(b"x")
            poller.register(socket_, zmq.POLLOUT)

        def flood():
            """Send until nothing more is taken."""
            sent = 0
            for ready, _ in poller.poll(300):
                if ready is not clients[0]:
                    ready.send(data, copy=False)
                    sent += 1
            return sent

        key = other.public.decode()
        connections = bound.connections
        monkeypatch.setattr(connections_module, "_SENDING_SECONDS", math.inf)
        while sum(x.sending > 0 for x in connections._by_descriptor.values()) < 16:
            flood()
            bound.beat()
            while bound.socket.poll(0):
                bound.receive()
        while bound.socket.poll(300):  # what waited in large buffers
            bound.receive()
        wait_until(lambda: not flood())  # the server reads nothing now
        # Linux doubles a buffer's size, and takes a whole segment while there is any room.
        allowed = 2 * connections_module._SHARED_BUFFER_BYTES + 16 * SEGMENT_BYTES
        assert waiting_bytes(bound, key) <= allowed
        assert own.public.decode() not in connections._buffers
        monkeypatch.setattr(connections_module, "_SENDING_SECONDS", 0.0)  # the flood is over
        bound.beat()
        assert not any(x.buffer for x in connections._by_descriptor.values())


def test_a_flood_does_not_take_all_descriptors():
    assert exit_code_of(exhaust) == 0

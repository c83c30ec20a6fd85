"""What belongs to a client's key: sessions, caches, shares of a server, and its connections."""

import contextlib
import os
import threading
import time

import msgspec
import pytest
import torch
import zmq

from seqpar.servers.server import server as server_module
from seqpar.servers.server import worker as worker_module
from seqpar.servers.server.caches import CacheLost, Caches
from seqpar.servers.server.clients import Clients
from seqpar.servers.server.worker import ComputeJob, Reader, ThreadsByKey, Worker
from seqpar.servers.transport.curve_keys import Trusted, client_keys, generate, server_keys
from seqpar.servers.transport.peers import Peer, fits, room
from seqpar.servers.transport.server_socket import ServerSocket
from seqpar.servers.transport.sockets import secure, send
from seqpar.servers.wire.codec import pack
from seqpar.servers.wire.limits import Limits, ServerDeadlines
from seqpar.servers.wire.protocol import (
    Goodbye,
    Ping,
    Refused,
    Result,
    Stale,
    Status,
    StatusRequest,
    decode,
    encode,
)
from tests.support.requests import random_request
from tests.support.servers import (
    Client,
    ServerProcess,
    connect,
    right_answer,
    running,
    same,
    wait_until,
)
from tests.tools.fuzz_protocol import LIMITS, ROWS, step
from tests.tools.hostile_connections import EVERY_KIND, attack_all

REQUEST = random_request(0)


def client_folder(folder, name):
    """Make keys of one more client that the server of a folder trusts."""
    other = generate(folder.parent / name)[0].parent
    (other / "server.public").write_bytes((folder / "server.public").read_bytes())
    public = (other / "client.public").read_bytes()
    (folder / "trusted" / f"{name}.public").write_bytes(public)
    return other


@pytest.fixture
def folder(tmp_path):
    """A folder of keys, of a server and the client a."""
    generate(tmp_path / "keys")
    return tmp_path / "keys"


def test_claimed_routing_ids_do_not_end_a_server(tmp_path):
    attack_all(200, tmp_path, [("ipc", False)])


@pytest.mark.exhaustive
def test_ten_thousand_hostile_connections(tmp_path):
    attack_all(2500, tmp_path, EVERY_KIND)


def test_a_claimed_id_does_not_take_a_session(folder, tmp_path):
    other = client_keys(client_folder(folder, "b"))
    with running("tcp://127.0.0.1:*", keys=server_keys(folder)) as server:  # noqa: SIM117
        with Client(server.address, client_keys(folder)) as a:
            with Client(server.address, other) as b:
                peers = {lease.peer for lease in server._clients}
                assert len({peer.route for peer in peers}) == len({x.key for x in peers}) == 2
                b.session, b.generation = a.session, a.generation
                message, frames = b.ask(pack(REQUEST))
                assert isinstance(message, Stale) and not frames
            assert right_answer(*a.ask(pack(REQUEST)), REQUEST)


def test_a_dead_clients_id_reaches_nothing(folder, monkeypatch):
    """Within a beat, without a greeting: the server's signs of life named the lease once."""
    beats = threading.Event()
    beat = Clients.beat
    monkeypatch.setattr(Clients, "beat", lambda *x: beat(*x) if beats.is_set() else None)
    other = client_keys(client_folder(folder, "b"))
    with running("tcp://127.0.0.1:*", keys=server_keys(folder)) as server:
        with Client(server.address, client_keys(folder), routing_id=b"victim") as a:
            first = step(0, 0, 0, 1, ROWS)
            a.say(first.numbered(a.generation, 1), *[x.tobytes() for x in first.parts])
            assert isinstance(a.hear()[0], Result)
        with zmq.Context() as context, context.socket(zmq.DEALER) as b:
            b.linger, b.routing_id = 0, b"victim"
            secure(b, other)
            b.connect(server.address)
            b.send(encode(StatusRequest()))
            status = decode(b.recv())
            assert isinstance(status, Status) and (status.clients, status.caches) == (1, 1)
            second = step(0, 1, ROWS, 1, 1)
            for secret in (bytes(16), a.session):  # even who knows all numbers reaches nothing
                b.send(encode(Ping(a.generation), secret))
                assert decode(b.recv()) == Stale(a.generation)
                header = encode(second.numbered(a.generation, 2), secret)
                b.send_multipart([header, *[x.tobytes() for x in second.parts]])
                assert decode(b.recv()) == Stale(a.generation)
            assert server.status().caches == 1
            beats.set()
            assert not b.poll(1000)  # four signs of life go to whoever has a lease


@pytest.mark.parametrize("secret", [bytes(16), b"x" * 16])
def test_messages_without_the_sessions_secret_are_stale(tmp_path, secret):
    with running(f"ipc://{tmp_path}/s") as server, Client(server.address) as client:
        right, client.session = client.session, secret
        for message in (Ping(client.generation), Goodbye(client.generation)):
            client.say(message)
            assert client.hear()[0] == Stale(client.generation)
        assert client.ask(pack(REQUEST))[0] == Stale(client.generation)
        client.session = right
        assert right_answer(*client.ask(pack(REQUEST)), REQUEST)


def test_another_key_on_a_connection_has_no_cache():
    caches = Caches(LIMITS.cache_bytes, torch.device("cpu"), "default")

    def admit(key, writes, start):
        packed = step(0, writes, start, 1, ROWS)
        header = msgspec.structs.replace(packed.header, checksum=packed.header.checksum)
        return caches.admit(Peer(b"route", key), header, [x.tobytes() for x in packed.parts])

    admit("a", 0, 0)
    with pytest.raises(CacheLost):
        admit("b", 1, ROWS)
    caches.end(Peer(b"route", "b"))
    assert len(caches) == 1


@pytest.mark.parametrize("keys", [1, 2, 3, 7])
def test_greedy_keys_leave_their_share(keys):
    held = dict.fromkeys(range(keys), 0)
    while True:
        takers = [x for x in held if fits(1, held[x], sum(held.values()), 840, True)]
        if not takers:
            break
        held[takers[0]] += 1
    assert 840 - sum(held.values()) >= 840 // 2**keys - 1
    assert all(room(x, sum(held.values()), 840, True) == 0 for x in held.values())
    assert room(0, sum(held.values()), 840, True) > 0


def test_one_key_cannot_take_all_leases(folder):
    other = client_keys(client_folder(folder, "b"))
    own, limits = client_keys(folder), Limits(clients=6)
    with running("tcp://127.0.0.1:*", keys=server_keys(folder), limits=limits) as server:
        greedy = [Client(server.address, own) for _ in range(8)]
        assert sum(isinstance(x.welcome, Refused) for x in greedy) == 5
        with Client(server.address, other) as honest:
            assert right_answer(*honest.ask(pack(REQUEST)), REQUEST)
        for client in greedy:
            client.close()


def test_a_key_waits_one_job_per_other_key():
    """The order of turns follows from the jobs alone, whatever a machine's speed."""
    worker = Worker(torch.device("cpu"), 2**10, lambda: None)
    task = pack(REQUEST).numbered(1, 1)
    for connection in range(128):
        worker.add(ComputeJob(Peer(bytes([connection]), "greedy"), task, None, 1, "kind"))
    worker.add(ComputeJob(Peer(b"h", "honest"), task, None, 1, "kind"))
    turns = [worker._take(False) for _ in range(3)]
    assert [len(jobs) for jobs in turns] == [1, 1, 1]
    assert "honest" in [jobs[0].client.key for jobs in turns[:2]]
    keys = "bcd"
    for key in keys:
        for connection in range(9):
            worker.add(ComputeJob(Peer(bytes([connection]), key), task, None, 1, "kind"))
    worker.add(ComputeJob(Peer(b"h", "honest"), task, None, 1, "kind"))
    order = [worker._take(False)[0].client.key for _ in range(len(keys) + 2)]
    assert "honest" in order and len(set(order)) == len(order)


@pytest.mark.parametrize("module", [worker_module, server_module], ids=["computed", "read"])
def test_keys_do_not_wait_for_each_other(folder, monkeypatch, module):
    """A task of one key has a result while a task of another key is computed, or is read."""
    name, rows = ("compute", 333) if module is worker_module else ("unpack", 9999)
    other, released, original = client_folder(folder, "b"), threading.Event(), getattr(module, name)

    def blocks(first, *arguments):
        if (first[0].q.shape[1] if name == "compute" else first.q_rows) == rows:
            assert released.wait(20)
        return original(first, *arguments)

    monkeypatch.setattr(module, name, blocks)
    blocked, large = random_request(1, rows, 64), random_request(2, 8888, 64)
    with running("tcp://127.0.0.1:*", keys=server_keys(folder)) as server:  # noqa: SIM117
        with Client(server.address, client_keys(folder)) as a:
            with Client(server.address, client_keys(other)) as b:
                for number in (1, 2):
                    packed = pack(blocked)
                    header = packed.numbered(a.generation, number)
                    a.say(header, *[x.tobytes() for x in packed.parts])
                try:
                    for request in (REQUEST, large, REQUEST):
                        assert right_answer(*b.ask(pack(request)), request)
                finally:
                    released.set()
                assert right_answer(*a.hear(), blocked) and right_answer(*a.hear(), blocked)


def test_many_connections_of_a_key_end_first(folder, tmp_path):
    """Although each of them sends messages more often than the honest client."""
    own, other = client_keys(folder), client_keys(client_folder(folder, "b"))
    bound = ServerSocket(
        f"ipc://{tmp_path}/s", server_keys(folder), Limits(clients=2), ServerDeadlines()
    )
    with contextlib.closing(bound), zmq.Context() as context, contextlib.ExitStack() as stack:
        for keys in (own, *[other] * 20):
            socket = stack.enter_context(context.socket(zmq.DEALER))
            socket.linger = 0
            secure(socket, keys)
            socket.connect(bound.address)
            socket.send(encode(Ping(1)))
            assert bound.socket.poll(20_000) and bound.receive() is not None
        bound.beat()
        remaining = [x for x in bound.connections._by_descriptor.values() if not x.ended]
        keys = [x.peer.key for x in remaining]
        assert (keys.count(own.public.decode()), len(keys)) == (1, 16)


def test_room_for_caches_takes_no_look_at_each(monkeypatch):
    """A client may have a million small caches, and each sign of life says what room is left."""
    caches = Caches(LIMITS.cache_bytes, torch.device("cpu"), "default")
    packed, peers = step(0, 0, 0, 1, ROWS), [Peer(b"1", "a"), Peer(b"2", "a"), Peer(b"3", "b")]
    for peer in peers:
        caches.admit(peer, packed.header, [x.tobytes() for x in packed.parts])
    each, free = caches.nbytes // 3, LIMITS.cache_bytes - caches.nbytes
    with monkeypatch.context() as patch:
        patch.setattr(caches, "_caches", None)
        assert caches.room_of("a", True) == (free - 2 * each) // 2
        assert caches.room_of("b", True) == (free - each) // 2
    for peer in peers:
        caches.end(peer)
    assert caches.nbytes == 0 and caches.room_of("a", True) == LIMITS.cache_bytes


def test_payloads_are_read_by_turns_of_keys():
    reader = Reader(lambda: None)
    task = pack(REQUEST).numbered(1, 1)
    for connection in range(128):
        reader.add(ComputeJob(Peer(bytes([connection]), "greedy"), task, None, 1, "kind"), object)
    reader.add(ComputeJob(Peer(b"h", "honest"), task, None, 1, "kind"), object)
    assert "honest" in [reader._take()[0].client.key for _ in range(2)]


def test_new_keys_do_not_overtake_waiting_ones(monkeypatch):
    clock = iter(range(0, 1000, 10))  # each turn takes longer than a key counts as served
    monkeypatch.setattr("seqpar.servers.server.worker.time.monotonic", lambda: next(clock))
    turns, peers = ThreadsByKey("", 1, print), {key: Peer(b"route", key) for key in "xyh"}
    turns.take({"h": peers["h"]})
    served = []
    for others in ("x", "y", "x", "y"):
        served.append(turns.take({key: peers[key] for key in (*others, "h")})[0].key)
    assert served.index("h") <= 2


def test_long_jobs_have_turns_of_their_own():
    """A key that has short jobs all the time does not wait longer with its long ones."""
    worker = Worker(torch.device("cpu"), 2**10, lambda: None)
    task = pack(REQUEST).numbered(1, 1)

    def add(key, connection, cost):
        worker.add(ComputeJob(Peer(connection, key), task, None, 1, "kind", cost=cost))

    for _ in range(4):
        add("a", b"long", 2**60)
        add("b", b"long", 2**60)
    order = []
    for _ in range(4):
        add("a", b"short", 0)
        order += [worker._take(False)[0].client.key, worker._take(True)[0].client.key]
    assert order[1::2].count("a") == order[1::2].count("b") == 2


def test_a_revoked_key_is_cut_within_a_beat(folder, caplog):
    other = client_folder(folder, "b")
    with running("tcp://127.0.0.1:*", keys=server_keys(folder)) as server:  # noqa: SIM117
        with Client(server.address, client_keys(folder)) as a:
            with Client(server.address, client_keys(other)) as b:
                assert right_answer(*b.ask(pack(REQUEST)), REQUEST)
                (folder / "trusted" / "b.public").unlink()
                start = time.monotonic()
                wait_until(lambda: server.status().clients == 1, 5)
                assert time.monotonic() - start < 2
                assert "its key is no longer trusted" in caplog.text
                b.say(pack(REQUEST).numbered(b.generation, 99))
                with pytest.raises(TimeoutError):
                    b.hear(0.5)
            assert right_answer(*a.ask(pack(REQUEST)), REQUEST)


def test_a_refused_handshake_is_logged(folder, caplog):
    other = client_keys(client_folder(folder, "b"))
    (folder / "trusted" / "b.public").unlink()
    with running("tcp://127.0.0.1:*", keys=server_keys(folder)) as server:  # noqa: SIM117
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            secure(socket, other)
            socket.connect(server.address)
            line = f"refused: client {other.public.decode()}: its key is not trusted"
            wait_until(lambda: line in caplog.text)


def test_a_client_with_half_a_message_is_cut(tmp_path, monkeypatch):
    """What it has of a message is not continued with another one."""
    sent = []

    def fails_at_the_third(socket, frames, track):
        sent.append(frames)
        if len(sent) == 3:
            raise zmq.Again
        return send(socket, frames, track)

    monkeypatch.setattr("seqpar.servers.transport.server_socket.send", fails_at_the_third)
    bound = ServerSocket(f"ipc://{tmp_path}/s", None, Limits(), ServerDeadlines())
    with contextlib.closing(bound), zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        events = client.get_monitor_socket(zmq.Event.DISCONNECTED)
        client.connect(bound.address)
        client.send(encode(Ping(1)))
        assert bound.socket.poll(20_000)
        peer, _ = bound.receive()
        assert bound.send(peer, [encode(Ping(1)), b"1", b"2", b"3"]) is None
        assert len(sent) == 3
        assert bound.send(peer, [encode(Ping(2))]) is None and len(sent) == 3
        assert events.poll(20_000), "the connection goes on"
        client.disable_monitor()
        events.close(linger=0)


def test_keys_are_rotated_without_a_lost_task(folder):
    with running("tcp://127.0.0.1:*", keys=server_keys(folder)) as server:  # noqa: SIM117
        with connect(server.address, keys=folder, home=False) as old:
            assert same(old.submit(REQUEST).result(20), REQUEST)
            other = client_folder(folder, "new")
            with connect(server.address, keys=other, home=False) as new:
                assert same(old.submit(REQUEST).result(20), REQUEST)
                (folder / "trusted" / "client.public").unlink()
                wait_until(lambda: old.report().servers[0].state == "connecting", 5)
                assert same(new.submit(REQUEST).result(20), REQUEST)


@pytest.mark.parametrize("path", ["trusted", "trusted/client.public", "server.public"])
def test_keys_that_others_can_write_are_refused(folder, path):
    os.chmod(folder / path, (folder / path).stat().st_mode | 0o022)
    if path == "trusted/client.public":
        assert not Trusted(folder / "trusted").keys
    else:
        with pytest.raises(ValueError, match=r"^keys: .*writable by its owner alone"):
            server_keys(folder)


def test_a_folder_that_others_can_write_trusts_nobody(folder):
    trusted = Trusted(folder / "trusted")
    assert len(trusted.keys) == 1
    os.chmod(folder / "trusted", 0o777)
    trusted.look()
    assert not trusted.keys
    os.chmod(folder / "trusted", 0o755)
    trusted.look()
    assert len(trusted.keys) == 1


def test_a_server_that_crashed_is_started_again(tmp_path):
    """A supervisor starts it at the same address; no bit of the answers changes."""
    address = f"ipc://{tmp_path}/s"
    server = ServerProcess(address)
    try:
        assert server.address
        with connect(address, home=False) as pool:
            assert same(pool.submit(REQUEST).result(20), REQUEST)
            server.signal("SIGSEGV")
            server.process.join(20)
            future = pool.submit(REQUEST)
            server = ServerProcess(address)
            assert server.address
            assert same(future.result(20), REQUEST)
    finally:
        server.end()

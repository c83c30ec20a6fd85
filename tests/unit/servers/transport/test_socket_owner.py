"""A pool sends nothing to a Unix socket that another user may have made."""

import os
import socket
import threading
import time

import pytest
import zmq

from seqpar.servers.server.server import Server
from seqpar.servers.transport.addresses import fault_of_folder, fault_of_socket
from seqpar.servers.transport.client_socket import ClientSocket
from seqpar.servers.wire.protocol import Ping, decode, encode
from tests.support.requests import random_request
from tests.support.servers import connect, running, same, wait_until

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def listener(tmp_path):
    """A listening socket, which counts connections."""
    path, accepted = tmp_path / "s", []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        path.chmod(0o600)
        server.listen()
        server.settimeout(0.05)

        def accept():
            try:
                accepted.append(server.accept())
            except TimeoutError:
                return False
            return True

        yield path, accept
        for connection, _ in accepted:
            connection.close()


def give_away(path):
    os.chown(path, NOBODY, NOBODY)


FAULTS = {
    "the mode of the socket": lambda path: path.chmod(0o622),
    "a folder that all may write to": lambda path: path.parent.chmod(0o777),
    "the owner of the socket": give_away,
    "the owner of the folder": lambda path: give_away(path.parent),
}


@pytest.mark.parametrize("fault", [
    pytest.param(name, marks=as_root if "owner" in name else ()) for name in FAULTS
])  # fmt: skip
def test_a_foreign_socket_is_sent_nothing(listener, fault):
    path, accept = listener
    assert fault_of_socket(str(path)) is None
    FAULTS[fault](path)
    named = fault_of_socket(str(path))
    assert named is not None and named.startswith((f"{path} ", f"{path.parent} "))
    with connect(f"ipc://{path}", deadlines={"connect": 0.3}) as pool:
        assert pool.report().servers[0].reason == named
        assert not accept()


@as_root
def test_a_link_of_another_user_is_not_followed(tmp_path):
    (tmp_path / "a").mkdir()
    link = tmp_path / "b"
    link.symlink_to(tmp_path / "a")
    assert fault_of_folder(str(link / "s")) is None
    os.lchown(link, NOBODY, NOBODY)
    assert fault_of_folder(str(link / "s")) == f"{link} belongs to another user"


def test_a_sticky_folder_is_taken(tmp_path):
    tmp_path.chmod(0o1777)
    assert fault_of_folder(str(tmp_path / "s")) is None


def test_a_process_of_another_user_is_sent_nothing(tmp_path, monkeypatch):
    with running(f"ipc://{tmp_path}/s") as server:
        other = os.geteuid() + 1
        monkeypatch.setattr(
            "seqpar.servers.transport.client_socket._user_at", lambda descriptor: other
        )
        with connect(server.address, deadlines={"connect": 0.5}) as pool:
            assert "another user's" in pool.report().servers[0].reason
            assert server.status().clients == 0


def test_a_missing_socket_is_named_and_awaited(tmp_path):
    address, request = f"ipc://{tmp_path}/s", random_request(1, 8, 8)
    with connect(address, deadlines={"connect": 0.2}) as pool:
        assert f"{tmp_path}/s: No such file" in pool.report().servers[0].reason
        with running(address):
            wait_until(lambda: pool.report().servers[0].state == "ready")
            assert same(pool.submit(request).result(20), request)
        wait_until(lambda: pool.report().servers[0].state == "connecting")
        with running(address):
            wait_until(lambda: pool.report().servers[0].state == "ready")


def test_one_of_many_servers_binds_a_path(tmp_path):
    bound, refused = [], []
    ready = threading.Barrier(8)

    def bind():
        ready.wait()
        try:
            bound.append(Server(f"ipc://{tmp_path}/s", transports=["zmq"]))
        except ValueError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=bind) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(bound) == 1 and all("another server listens" in reason for reason in refused)
    for server in bound:
        server.stop()
        server.run()
    with running(f"ipc://{tmp_path}/s"):
        pass
    assert not (tmp_path / "s.lock").exists()


def test_a_leaving_servers_last_replies_are_read(tmp_path):
    address, poller = f"ipc://{tmp_path}/s", zmq.Poller()
    with zmq.Context() as context, zmq.Context() as other:
        server = other.socket(zmq.ROUTER)
        server.bind(address)
        os.chmod(tmp_path / "s", 0o600)
        dialled = ClientSocket(context, poller, address, None, 20.0)
        try:
            dialled.send([encode(Ping(1))])
            end = time.monotonic() + 20
            while not server.poll(10):
                assert dialled.broken() is None and time.monotonic() < end
            peer, _ = server.recv_multipart()
            for number in range(3):
                server.send_multipart([peer, encode(Ping(number))])
            server.close(linger=20_000)
            other.term()
            while dialled.broken() is None:
                poller.poll(10)  # as a pool does, before it reads
                assert time.monotonic() < end
            poller.poll(10)
            answers = [dialled.receive() for _ in range(3)]
            assert [decode(frames[0]) for frames in answers] == [Ping(x) for x in range(3)]
        finally:
            dialled.close(0)

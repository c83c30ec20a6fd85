"""Keys: who is let in, who is not, and how secrets are kept."""

import errno
import os
import stat
import time

import pytest
import zmq

from seqpar.servers.status_client import ask
from seqpar.servers.transport.addresses import is_local
from seqpar.servers.transport.curve_keys import (
    Trusted,
    client_keys,
    generate,
    server_keys,
    trusts,
)
from seqpar.servers.wire.protocol import StatusRequest, encode
from tests.support.requests import random_request
from tests.support.servers import QUICK, connect, running, same, wait_until

REQUEST = random_request(0)


@pytest.fixture
def folder(tmp_path):
    """A folder of keys."""
    generate(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def server(folder):
    """A server with keys, on all addresses of this machine."""
    keys = server_keys(folder)
    with running("tcp://0.0.0.0:*", keys=keys, deadlines=QUICK) as server:
        port = server.address.rpartition(":")[2]
        server.address = f"tcp://127.0.0.1:{port}"
        yield server


def test_a_trusted_client_is_served(server, folder):
    with connect(server.address, keys=folder, home=False) as pool:
        assert same(pool.submit(REQUEST).result(20), REQUEST)
    assert ask(server.address, folder, 5.0).tasks == 1


@pytest.mark.parametrize("mistake", [
    "another client",
    pytest.param("no keys", marks=pytest.mark.exhaustive),
    pytest.param("another server", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_others_are_refused_and_nothing_is_computed(server, folder, tmp_path, mistake):
    other = generate(tmp_path / "other")[0].parent
    keys = {"no keys": None, "another client": other, "another server": folder}[mistake]
    if mistake == "another client":
        (other / "server.public").write_bytes((folder / "server.public").read_bytes())
    elif mistake == "another server":
        (folder / "server.public").write_bytes((other / "server.public").read_bytes())
    with connect(server.address, keys=keys, deadlines={"connect": 0.5}) as pool:
        assert pool.report().servers[0].state == "connecting"
        assert same(pool.submit(REQUEST).result(20), REQUEST)
        assert pool.report().servers[-1].tasks == 1
        wait_until(lambda: "keys" in pool.report().servers[0].reason
                   or mistake == "another server", 5)  # fmt: skip
    why = {"another client": ".*are the keys right", "no keys": ": it "}.get(mistake, "")
    with pytest.raises(TimeoutError, match=rf"has not answered within 0\.5 s{why}"):
        ask(server.address, keys, 0.5)
    assert server.totals.tasks == 0 and server.status().clients == 0


def test_trust_changes_while_a_server_runs(server, folder, tmp_path):
    other = generate(tmp_path / "other")[0].parent
    (other / "server.public").write_bytes((folder / "server.public").read_bytes())
    with pytest.raises(TimeoutError):
        ask(server.address, other, 0.5)
    for i in range(9):  # files that are being written, in whatever order they are listed
        (folder / "trusted" / f"{i}.public").write_text("half a key")
    (folder / "trusted" / "folder.public").mkdir()
    trusted = folder / "trusted" / "other.public"
    trusted.write_bytes((other / "client.public").read_bytes())
    assert ask(server.address, other, 5.0).tasks == 0
    trusted.unlink()
    with pytest.raises(TimeoutError):
        ask(server.address, other, 0.5)


def test_encrypted_messages_cannot_be_replayed_in_clear(server):
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(server.address)
        socket.send(encode(StatusRequest()))
        assert not socket.poll(500)


def test_secrets_are_their_owners_alone(folder):
    for file in folder.iterdir():
        if file.suffix == ".secret":
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            os.chmod(file, 0o640)
    for load in (server_keys, client_keys):
        with pytest.raises(ValueError, match=r"^keys: .*chmod 600"):
            load(folder)


def test_key_files_are_kept_and_wrong_ones_named(folder):
    with pytest.raises(ValueError, match="exists already"):
        generate(folder)
    (folder / "client.public").write_text("too short")
    with pytest.raises(ValueError, match=r"client\.public must hold a key"):
        client_keys(folder)
    assert trusts(folder / "trusted", server_keys(folder).public) is False
    (folder / "trusted" / "client.public").unlink()
    (folder / "trusted").rmdir()
    with pytest.raises(ValueError, match="trusted must be a folder"):
        server_keys(folder)


@pytest.mark.parametrize(("address", "local"), [
    ("ipc:///s", True), ("tcp://127.0.0.1:5", True), ("tcp://127.9.9.9:5", True),
    ("tcp://[::1]:5", True), ("tcp://localhost:5", True), ("tcp://0.0.0.0:5", False),
    ("tcp://*:5", False), ("tcp://10.0.0.1:5", False), ("tcp://[::]:5", False),
    ("tcp://127.0.0.1.example.com:5", False), ("tcp://localhost.example.com:5", False),
])  # fmt: skip
def test_local_addresses_are_told_from_others(address, local):
    assert is_local(address) is local


def test_a_server_with_keys_refuses_quickly(server):
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        ask(server.address, None, 0.3)
    assert time.monotonic() - start < 5


def test_keys_stay_while_no_file_can_be_opened(folder, monkeypatch):
    """Otherwise, connections that use up all descriptors would end every session."""
    known = Trusted(folder / "trusted")
    keys = known.keys

    def fail(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        (folder / "trusted" / "other.public").write_bytes(b"")
        known.look()
    assert keys and known.keys == keys
    (folder / "trusted" / "client.public").unlink()
    known.look()
    assert not known.keys

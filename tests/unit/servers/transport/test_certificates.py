"""Certificates: who is let in, who is not, and what odd and changing files do to a server."""

import asyncio
import errno
import os
import re
import shutil
import threading
import time
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import grpc
import grpc.aio
import pytest

from seqpar.servers.transport import authority, certificates
from seqpar.servers.transport.authority import add_client, generate, revoke, rotate
from seqpar.servers.transport.certificates import (
    SERVER_NAME,
    ClientIdentity,
    ServerIdentity,
    is_pair,
)
from tests.support.other_user import as_root

REFUSED = "refused"
CERTIFICATE = authority._pem(authority._new_authority(1).certificate)


@pytest.fixture
def folder(tmp_path):
    """A folder of keys."""
    generate(tmp_path / "keys")
    return tmp_path / "keys"


@asynccontextmanager
async def serving(identity):
    """A server that answers with the name of the client's certificate; its port."""

    async def answer(request, context):
        (pem,) = context.auth_context()["x509_pem_cert"]
        return (identity.name_of(pem) or "nobody").encode()

    server = grpc.aio.server()
    methods = {"Name": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test", methods)])
    port = server.add_secure_port("127.0.0.1:0", identity.credentials())
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


def channel(port, credentials, name=SERVER_NAME):
    """A channel that shares its connection with no other one."""
    options = [("grpc.ssl_target_name_override", name), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options)


async def ask(opened):
    try:
        return (await opened.unary_unary("/test/Name")(b"", timeout=20)).decode()
    except grpc.aio.AioRpcError as error:
        if error.code() != grpc.StatusCode.UNAVAILABLE:
            raise
        return REFUSED


async def ask_once(port, credentials, name=SERVER_NAME):
    async with channel(port, credentials, name) as opened:
        return await ask(opened)


def handshake(server, credentials, name=SERVER_NAME):
    """The name that a server has for a client, or "refused" if there is no connection."""

    async def ask_server():
        async with serving(server) as port:
            return await ask_once(port, credentials, name)

    return asyncio.run(ask_server())


def mixed(folder, crt, trusted):
    """The credentials of a client with a certificate of one folder that trusts another folder."""
    pems = b"".join(file.read_bytes() for file in (trusted / "authorities").iterdir())
    pair = [(folder / f"{crt}.{x}").read_bytes() for x in ("key", "crt")]
    return grpc.ssl_channel_credentials(pems, *pair)


def client_pem(folder):
    """A client's certificate, as gRPC shows it to a server."""
    return (folder / "client.crt").read_bytes()


def test_both_sides_accept_each_other(folder):
    assert handshake(ServerIdentity(folder), ClientIdentity(folder).credentials()) == "client"
    add_client(folder, "alice")
    alice = ClientIdentity(folder / "clients" / "alice")
    assert handshake(ServerIdentity(folder), alice.credentials()) == "alice"


@pytest.mark.parametrize("mistake", [
    "no certificate", "another client", "another server", "a server as a client", "another name",
    "a client as a server",
])  # fmt: skip
def test_others_are_refused(folder, tmp_path, mistake):
    generate(other := tmp_path / "other")
    server, name = ServerIdentity(folder), SERVER_NAME
    credentials = mixed(folder, "client", folder)
    if mistake == "no certificate":
        authority = (folder / "authorities" / "1.crt").read_bytes()
        credentials = grpc.ssl_channel_credentials(authority)
    elif mistake == "another client":
        credentials = mixed(other, "client", folder)
    elif mistake == "another server":
        credentials = mixed(folder, "client", other)
    elif mistake == "a server as a client":
        credentials = mixed(folder, "server", folder)
    elif mistake == "another name":
        name = "example.com"
    else:
        pair = [(folder / f"client.{x}").read_bytes() for x in ("key", "crt")]
        trusted = (folder / "authorities" / "1.crt").read_bytes()
        server._configuration = grpc.ssl_server_certificate_configuration([pair], trusted)
    assert handshake(server, credentials, name) == REFUSED


@pytest.mark.parametrize("mistake", ["another client", "a server", "a changed byte", "nonsense"])
def test_names_need_a_certificate_of_an_authority(folder, tmp_path, mistake):
    generate(other := tmp_path / "other")
    server = ServerIdentity(folder)
    pem = {
        "another client": (other / "client.crt").read_bytes(),
        "a server": (folder / "server.crt").read_bytes(),
        "a changed byte": client_pem(folder).replace(b"A", b"B", 1),
        "nonsense": b"\xff" * 1000,
    }[mistake]
    assert server.name_of(pem) is None
    assert server.name_of(client_pem(folder)) == "client"


def test_revocation_cuts_an_open_connection(folder):
    add_client(folder, "alice")
    server = ServerIdentity(folder)

    async def ask_around_revocation():
        alice = ClientIdentity(folder / "clients" / "alice").credentials()
        async with serving(server) as port, channel(port, alice) as opened:
            before = await ask(opened)
            revoke(folder, "alice")
            assert server.look() == []
            other = await ask_once(port, ClientIdentity(folder).credentials())
            return before, await ask(opened), other

    assert asyncio.run(ask_around_revocation()) == ("alice", "nobody", "client")
    assert ServerIdentity(folder).name_of(client_pem(folder / "clients" / "alice")) is None
    (folder / "revoked" / "alice-1.crt").unlink()
    server.look()
    assert server.name_of(client_pem(folder / "clients" / "alice")) == "alice"


def test_a_revoked_authority_is_not_trusted(folder):
    server = ServerIdentity(folder)
    shutil.copy(folder / "authorities" / "1.crt", folder / "revoked")
    server.look()
    assert server.name_of(client_pem(folder)) is None
    with pytest.raises(ValueError, match=r"^keys: .*revoked must not hold all authorities"):
        ServerIdentity(folder)


def test_authorities_are_rotated_without_a_restart(folder, tmp_path):
    server, client = ServerIdentity(folder), ClientIdentity(folder)
    old = client.credentials()
    shutil.copytree(folder, before := tmp_path / "before")

    async def ask_each():
        async with serving(server) as port, channel(port, old) as opened:
            assert await ask(opened) == "client"
            rotate(folder)
            assert server.look() == [] and client.look()
            assert server.look() == [] and not client.look()
            new = client.credentials()
            assert await ask(opened) == "client"  # of the old authority
            assert await ask_once(port, new) == "client"
            assert await ask_once(port, old) == REFUSED  # it does not trust the new server
            shutil.copy(folder / "authorities" / "2.crt", before / "authorities")
            assert await ask_once(port, mixed(before, "client", before)) == "client"
            (folder / "authorities" / "1.crt").unlink()
            assert server.look() == []
            assert await ask(opened) == "nobody"
            assert await ask_once(port, mixed(before, "client", before)) == REFUSED
            assert await ask_once(port, new) == "client"

    asyncio.run(ask_each())


def test_a_servers_pair_is_replaced_without_a_restart(folder):
    server = ServerIdentity(folder)
    rotate(folder)
    only_new = ClientIdentity(folder)
    (folder / "authorities" / "1.crt").rename(folder / "1.crt")
    assert only_new.look()
    (folder / "1.crt").rename(folder / "authorities" / "1.crt")

    async def ask_around_look():
        async with serving(server) as port:
            before = await ask_once(port, only_new.credentials())
            server.look()
            return before, await ask_once(port, only_new.credentials())

    assert asyncio.run(ask_around_look()) == (REFUSED, "client")


def test_half_a_pair_leaves_the_old_one(folder, tmp_path):
    server, client = ServerIdentity(folder), ClientIdentity(folder)
    shutil.copytree(folder, old := tmp_path / "old")
    rotate(folder)
    for file in ("server.crt", "client.crt"):
        shutil.copy(old / file, folder / file)
    for _ in range(2):
        assert client.look() is (_ == 0)  # for the new authority
    assert [fault.rpartition("/")[2] for fault in server.look()] == [
        "server.key must be of one pair"
    ]
    assert server.look() == []
    assert [fault.rpartition("/")[2] for fault in client.faults()] == [
        "client.key must be of one pair"
    ]
    assert client.faults() == []
    assert handshake(server, client.credentials()) == "client"
    for load_identity in (ServerIdentity, ClientIdentity):
        with pytest.raises(ValueError, match=r"^keys: .* must be of one pair"):
            load_identity(folder)


def test_a_look_while_pairs_are_replaced_has_a_pair(folder):
    server, done = ServerIdentity(folder), threading.Event()

    def rotate_often():
        for _ in range(30):
            rotate(folder)
        done.set()

    thread = threading.Thread(target=rotate_often)
    thread.start()
    looks, keys = 0, set()
    while not done.is_set():
        server.look()
        certificate, key = server._own()
        assert is_pair(certificate, key)
        looks, keys = looks + 1, keys | {key}
    thread.join()
    server.look()
    assert looks > 10 and len(keys) > 1
    assert server._own()[1] == (folder / "server.key").read_bytes()


ODD = {
    "a fifo": os.mkfifo,
    "a dangling link": lambda file: file.symlink_to("/nonexistent/elsewhere"),
    "a link to itself": lambda file: file.symlink_to(file),
    "a device": lambda file: file.symlink_to("/dev/zero"),
    "a folder": lambda file: file.mkdir(),
    "an empty file": lambda file: file.write_bytes(b""),
    "a large file": lambda file: file.write_bytes(b"\xff" * 2**20),
    "half a certificate": lambda file: file.write_bytes(CERTIFICATE[:200]),
    "two certificates": lambda file: file.write_bytes(2 * CERTIFICATE),
}


@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize("where", ["authorities", "revoked"])
def test_odd_files_are_skipped_and_reported_once(folder, where, make):
    add_client(folder, "alice")
    revoke(folder, "alice")
    running = ServerIdentity(folder)
    ODD[make](folder / where / "0.crt")
    for server in (running, ServerIdentity(folder)):
        (fault,) = server.look()
        assert fault.startswith(f"keys: {folder}/{where}/0.crt ")
        assert server.look() == []
        assert server.name_of(client_pem(folder)) == "client"
        assert server.name_of(client_pem(folder / "clients" / "alice")) is None


@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize("where", ["authorities/1.crt", "revoked/alice-1.crt", "server.key"])
def test_a_file_that_turns_odd_keeps_its_effect(folder, where, make):
    add_client(folder, "alice")
    revoke(folder, "alice")
    server, client = ServerIdentity(folder), ClientIdentity(folder)
    file = folder / where
    file.unlink()
    ODD[make](file)
    (fault,) = server.look()
    assert fault.startswith(f"keys: {file} ") and server.look() == []
    assert server.name_of(client_pem(folder / "clients" / "alice")) is None
    assert handshake(server, client.credentials()) == "client"


def test_names_of_files_that_are_ignored_are_reported(folder):
    (folder / "revoked" / ".hidden").write_bytes(b"")
    shutil.copy(folder / "client.crt", folder / "revoked" / "client.pem\x1b[2J")
    server = ServerIdentity(folder)
    (fault,) = server.look()
    assert fault.endswith(r"client.pem\x1b[2J is ignored: its name must end in .crt")


@pytest.mark.parametrize("where", ["authorities", "revoked"])
def test_a_folder_that_vanishes_keeps_its_effect(folder, where):
    add_client(folder, "alice")
    revoke(folder, "alice")
    server = ServerIdentity(folder)
    (folder / where).rename(folder / "elsewhere")
    (fault,) = server.look()
    assert (
        fault
        == f"keys: {folder}/{where} must be a folder of certificates: No such file or directory"
    )
    assert server.name_of(client_pem(folder)) == "client"
    assert server.name_of(client_pem(folder / "clients" / "alice")) is None
    with pytest.raises(ValueError, match=f"^{fault}$"):
        ServerIdentity(folder)
    (folder / "elsewhere").rename(folder / where)
    assert server.look() == []


def test_without_authorities_nobody_has_a_name(folder):
    server, client = ServerIdentity(folder), ClientIdentity(folder)
    (folder / "authorities" / "1.crt").unlink()
    (fault,) = server.look()
    assert fault == f"keys: {folder}/authorities must hold an authority's certificate"
    assert not client.look() and client.faults() == [fault]
    assert handshake(server, client.credentials()) == "nobody"
    for load_identity in (ServerIdentity, ClientIdentity):
        with pytest.raises(ValueError, match=fault):
            load_identity(folder)


@pytest.mark.parametrize("function", ["open", "listdir", "stat"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOENT, errno.EACCES])
def test_what_was_read_stays_while_reading_fails(folder, monkeypatch, function, number):
    """A client could use up all descriptors, and files can disappear after they were listed."""
    add_client(folder, "alice")
    server = ServerIdentity(folder)

    shutil.copy(folder / "issued" / "alice-1.crt", folder / "revoked")

    def fail(path, *_):
        raise OSError(number, os.strerror(number), path)

    for alice in ("alice", None):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, fail)
            faults = server.look()
            assert faults and all(os.strerror(number) in fault for fault in faults)
            assert server.look() == []
            assert server.name_of(client_pem(folder)) == "client"
            assert server.name_of(client_pem(folder / "clients" / "alice")) == alice
        assert server.look() == []
        assert server.name_of(client_pem(folder / "clients" / "alice")) is None


def test_a_folder_that_changes_while_it_is_listed_stays(folder, monkeypatch):
    """A volume of Kubernetes is replaced, and the files of the old one are removed."""
    add_client(folder, "alice")
    revoke(folder, "alice")
    server, listdir = ServerIdentity(folder), os.listdir

    def list_half(path):
        names = listdir(path)
        if path.name == "revoked":
            names.remove("alice-1.crt")
            (path / "new.crt").touch()
        return names

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", list_half)
        (fault,) = server.look()
    assert fault == f"keys: {folder}/revoked has changed while it was read"
    assert server.name_of(client_pem(folder / "clients" / "alice")) is None


def test_a_volume_of_links_is_read_and_replaced(folder, tmp_path):
    """Kubernetes mounts a secret as links to the files of a folder, and replaces one link."""
    volume = tmp_path / "volume"
    volume.mkdir(mode=0o777)
    volume.chmod(0o1777)
    shutil.copytree(folder, volume / "..1")
    (volume / "..data").symlink_to("..1")
    for name in ("server.crt", "server.key", "authorities", "revoked"):
        (volume / name).symlink_to(f"..data/{name}")
    server = ServerIdentity(volume)
    assert server.look() == [] and server.name_of(client_pem(folder)) == "client"
    revoke(folder, "client")
    shutil.copytree(folder, volume / "..2")
    (volume / "..new").symlink_to("..2")
    (volume / "..new").rename(volume / "..data")
    shutil.rmtree(volume / "..1")
    assert server.look() == [] and server.name_of(client_pem(folder)) is None


def test_files_are_read_only_when_they_change(folder, monkeypatch):
    server = ServerIdentity(folder)
    time.sleep(1.1)  # until then, a file may change and leave no trace in its times
    server.look()
    monkeypatch.setattr(certificates, "read", None)
    names = server._names
    for _ in range(3):
        assert server.look() == []
    assert server._names is names
    monkeypatch.undo()
    shutil.copy(folder / "client.crt", folder / "revoked" / "client.crt")
    rotate(folder)
    server.look()
    assert server.name_of(client_pem(folder)) == "client"
    assert server._own()[1] == (folder / "server.key").read_bytes()


UNSAFE = {
    "a folder": lambda folder: (folder / "authorities").chmod(0o775),
    "revocations": lambda folder: (folder / "revoked").chmod(0o757),
    "a sticky folder": lambda folder: (folder / "revoked").chmod(0o1777),
    "a revocation": lambda folder: unsafe_file(folder / "revoked" / "alice-1.crt"),
    "the parent": lambda folder: folder.chmod(0o777),
    "an authority": lambda folder: (folder / "authorities" / "1.crt").chmod(0o664),
    "a certificate": lambda folder: (folder / "server.crt").chmod(0o646),
    "another owner": lambda folder: os.chown(folder / "authorities" / "1.crt", 12345, -1),
    "a link of another owner": lambda folder: link_of_another(folder / "authorities"),
}


def unsafe_file(file):
    file.write_bytes(CERTIFICATE)
    file.chmod(0o666)


def link_of_another(folder):
    folder.rename(folder.with_name("real"))
    folder.symlink_to("real")
    os.chown(folder, 12345, -1, follow_symlinks=False)


UNSAFE_TEXT = " (may be written to by other users|belongs to another user)"


@pytest.mark.parametrize("change", UNSAFE)
def test_what_others_can_write_is_refused_or_reported(folder, change):
    if "owner" in change and os.geteuid():
        pytest.skip("only root can give files away")
    server = ServerIdentity(folder)
    UNSAFE[change](folder)
    with pytest.raises(ValueError, match=rf"^keys: .*{UNSAFE_TEXT}"):
        ServerIdentity(folder)
    fault = server.look()[0]
    assert re.search(UNSAFE_TEXT, fault) and server.look() == []
    assert server.name_of(client_pem(folder)) == "client"


def test_a_folder_that_others_can_write_changes_nothing(folder, tmp_path):
    generate(other := tmp_path / "other")
    server = ServerIdentity(folder)
    (folder / "authorities").chmod(0o777)
    shutil.copy(other / "authorities" / "1.crt", folder / "authorities" / "2.crt")
    server.look()
    assert server.name_of(client_pem(other)) is None
    (folder / "authorities").chmod(0o755)
    server.look()
    assert server.name_of(client_pem(other)) == "client"


@pytest.mark.parametrize(("who", "load_identity"), [
    ("server", ServerIdentity), ("client", ClientIdentity),
])  # fmt: skip
def test_private_keys_are_their_owners_alone(folder, who, load_identity):
    running = load_identity(folder)
    (folder / f"{who}.key").chmod(0o640)
    with pytest.raises(ValueError, match=r"^keys: .*\.key must be readable by .* \(chmod 600\)"):
        load_identity(folder)
    faults = running.look() if who == "server" else [running.look(), *running.faults()][1:]
    assert len(faults) == 1 and "chmod 600" in faults[0]


@as_root
@pytest.mark.parametrize(("mode", "owner", "user", "accepted"), [
    (0o440, 0, 12345, True),
    (0o440, 0, 0, False),
    (0o440, 12345, 12345, False),
    (0o444, 0, 12345, False),
    (0o460, 0, 12345, False),
])  # fmt: skip
def test_roots_key_may_be_a_groups(folder, monkeypatch, mode, owner, user, accepted):
    key = folder / "server.key"
    key.chmod(mode)
    os.chown(key, owner, -1)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    if accepted:
        assert ServerIdentity(folder).look() == []
    else:
        said = "(must be readable by its owner|may be written to by other users)"
        with pytest.raises(ValueError, match=rf"server\.key {said}"):
            ServerIdentity(folder)


@pytest.mark.parametrize(("change", "wrong"), [
    (lambda x: (x / "server.crt").unlink(), "server.crt cannot be read: No such file"),
    (lambda x: (x / "server.key").unlink(), "server.key cannot be read: No such file"),
    (lambda x: shutil.copy(x / "client.crt", x / "server.crt"),
     "server.crt must hold the certificate of a server, with the name server.seqpar"),
    (lambda x: shutil.copy(x / "client.key", x / "server.key"), "must be of one pair"),
    (lambda x: (x / "server.key").write_bytes(b"nonsense"), "must be of one pair"),
    (lambda x: (x / "server.crt").write_bytes(b"nonsense"),
     "server.crt must hold one certificate, as keygen makes it"),
    (lambda x: shutil.copy(x / "server.crt", x / "authorities" / "1.crt"),
     "1.crt must hold the certificate of an authority"),
])  # fmt: skip
def test_wrong_files_are_named_and_not_shown(folder, change, wrong):
    secret = (folder / "server.key").read_text().splitlines()[1]
    change(folder)
    with pytest.raises(ValueError, match=r"^keys: ") as raised:
        ServerIdentity(folder)
    assert wrong in str(raised.value) and secret not in str(raised.value)


def test_keys_of_earlier_versions_name_the_command(tmp_path):
    (tmp_path / "server.secret").touch()
    for load_identity in (ServerIdentity, ClientIdentity):
        with pytest.raises(ValueError, match=r"^keys: .*server\.secret is a CURVE key .*"
                                             r"`python -m seqpar keygen NEWFOLDER`"):  # fmt: skip
            load_identity(tmp_path)


def test_a_server_needs_the_name_that_clients_require(tmp_path, monkeypatch):
    monkeypatch.setattr(authority, "SERVER_NAME", "example.com")
    generate(folder := tmp_path / "keys")
    with pytest.raises(ValueError, match=r"^keys: .* a server, with the name server\.seqpar"):
        ServerIdentity(folder)


def test_a_name_that_cannot_be_printed_is_no_name(folder):
    by = authority._authority(folder)
    for name, expected in (("node 3/gpu@x", "node 3/gpu@x"), ("a\x1b[2J", None), ("a\nb", None)):
        key = authority.ec.generate_private_key(authority.ec.SECP256R1())
        subject, issuer = authority._named(name), by.certificate.subject
        use = authority.x509.ExtendedKeyUsage([authority.ExtendedKeyUsageOID.CLIENT_AUTH])
        made = authority._builder(subject, issuer, key, 365).add_extension(use, critical=False)
        pem = authority._pem(made.sign(by.key, authority.hashes.SHA256()))
        assert ServerIdentity(folder).name_of(pem) == expected


def test_known_names_have_a_limit(folder, monkeypatch):
    monkeypatch.setattr(certificates, "_MOST_NAMES", 4)
    server = ServerIdentity(folder)
    for i in range(10):
        assert server.name_of(b"%d" % i) is None
    assert server.name_of(client_pem(folder)) == "client" and len(server._names) <= 4


def test_a_name_ends_with_its_authority(tmp_path, days, monkeypatch):
    days(365, 365, 2)
    generate(folder := tmp_path / "keys")
    server = ServerIdentity(folder)
    assert server.name_of(client_pem(folder)) == "client"
    monkeypatch.setattr(certificates, "datetime", Later)
    assert server.name_of(client_pem(folder)) is None


class Later(datetime):
    """The time in three days."""

    @classmethod
    def now(cls, zone):
        return datetime.now(zone) + timedelta(3)


@pytest.fixture
def days(monkeypatch):
    """A function that makes the certificates of the next folders end after some days."""

    def end_after(server, client=365, authority_days=3650):
        monkeypatch.setattr(authority, "AUTHORITY_DAYS", authority_days)
        issue = authority._issue

        def issue_for(folder, by, name):
            monkeypatch.setattr(authority, "DAYS", server if name == "server" else client)
            return issue(folder, by, name)

        monkeypatch.setattr(authority, "_issue", issue_for)

    return end_after


@pytest.mark.parametrize(("ends", "name"), [
    ({"server": 29}, "server.crt ends"), ({"server": 365, "client": 29}, "of client client ends"),
    ({"server": 365, "authority_days": 29}, "1.crt ends"),
])  # fmt: skip
def test_a_certificate_that_ends_soon_is_a_fault(tmp_path, days, ends, name):
    days(**ends)
    generate(folder := tmp_path / "keys")
    server = ServerIdentity(folder)
    assert server.name_of(client_pem(folder)) == "client"
    faults = server.look()
    day = datetime.now(UTC) + timedelta(29)
    assert any(fault.endswith(f"{name} on {day:%Y-%m-%d}") for fault in faults)
    assert len(faults) == (2 if "authority_days" in ends else 1) and server.look() == []


def test_a_certificate_that_has_ended_has_no_name(tmp_path, days, monkeypatch):
    days(365, 2)
    generate(folder := tmp_path / "keys")
    server = ServerIdentity(folder)
    client = ClientIdentity(folder)
    assert server.name_of(client_pem(folder)) == "client"

    monkeypatch.setattr(certificates, "datetime", Later)
    assert server.name_of(client_pem(folder)) is None
    with pytest.raises(ValueError, match=r"client\.crt is valid only from"):
        ClientIdentity(folder)
    client.look()
    assert "client.crt has ended on" in client.faults()[-1]


def test_tls_refuses_a_certificate_that_has_ended(tmp_path, days):
    days(365, -1 / 48)  # certificates begin an hour before they are made
    generate(folder := tmp_path / "keys")
    assert handshake(ServerIdentity(folder), mixed(folder, "client", folder)) == REFUSED

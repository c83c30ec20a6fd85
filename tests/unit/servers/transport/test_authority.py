"""Making certificates: names, files and their modes, and rotations that are cut off."""

import errno
import fcntl
import os
import stat
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from seqpar.servers.transport.authority import add_client, generate, revoke, rotate
from seqpar.servers.transport.certificates import ClientIdentity, ServerIdentity, load


@pytest.fixture
def folder(tmp_path):
    """A folder of keys."""
    generate(tmp_path / "keys")
    return tmp_path / "keys"


def contents(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(params=[0o000, 0o002, 0o022, 0o077])
def any_umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_private_keys_are_their_owners_alone(tmp_path, any_umask):
    generate(folder := tmp_path / "new" / "keys")
    add_client(folder, "alice")
    rotate(folder)
    keys = sorted(folder.rglob("*.key"))
    names = ["authority.key", "client.key", "clients/alice/client.key", "server.key"]
    assert [str(key.relative_to(folder)) for key in keys] == names
    assert all(stat.S_IMODE(key.stat().st_mode) == 0o600 for key in keys)
    assert ServerIdentity(folder).look() == []


def test_all_new_files_are_returned(folder):
    made = contents(folder)
    for make in (lambda: add_client(folder, "alice"), lambda: revoke(folder, "alice"),
                 lambda: rotate(folder)):  # fmt: skip
        files = make()
        now = contents(folder)
        changed = {file for file in now if now[file] != made.get(file)}
        assert set(files) == changed - {folder / "authority.key"}
        made = now


def test_certificates_are_valid_for_a_year(folder):
    for name, days in (("server.crt", 365), ("client.crt", 365), ("authorities/1.crt", 3653)):
        made = load(folder / name, "any")
        valid = made.not_valid_after_utc - made.not_valid_before_utc
        assert valid == timedelta(days=days, hours=1)


@pytest.mark.parametrize("name", [
    "authority.key", "authorities", "revoked", "issued", "clients", "server.crt", "client.key",
])  # fmt: skip
@pytest.mark.parametrize("dangling", [False, True])
def test_nothing_is_made_over_what_exists(tmp_path, name, dangling):
    file = tmp_path / name
    file.symlink_to("/nonexistent/elsewhere") if dangling else file.write_text("something")
    with pytest.raises(ValueError, match=rf"^folder: .*{name} exists already"):
        generate(tmp_path)
    assert list(tmp_path.iterdir()) == [file]
    assert dangling or file.read_text() == "something"


def test_a_clients_folder_is_not_made_over_another(folder):
    (folder / "clients" / "alice").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"^folder: .*alice exists already"):
        add_client(folder, "alice")


def test_a_folder_of_curve_keys_is_not_mixed(tmp_path):
    (tmp_path / "server.public").touch()
    with pytest.raises(ValueError, match=r"server\.public is a CURVE key"):
        generate(tmp_path)


@pytest.mark.parametrize("name", [
    "", ".", "..", "../alice", "a/b", "a b", "-a", ".a", "a\n", "a\0", "\x1b[2J", "\u00e4",
    "\u0663", "a\u00e4", "a\u0663", "a" * 33,
])  # fmt: skip
def test_names_that_are_no_names_are_refused(folder, name):
    before = contents(folder)
    with pytest.raises(ValueError, match=r"^client must be a name of 1 to 32 letters") as raised:
        add_client(folder, name)
    assert str(raised.value).isprintable() and contents(folder) == before


def test_names_are_unique(folder):
    add_client(folder, "alice")
    revoke(folder, "alice")
    for name in ("client", "server", "alice"):
        with pytest.raises(ValueError, match=rf"^client: the name {name} was used already"):
            add_client(folder, name)
    add_client(folder, "alice-1")
    with pytest.raises(ValueError, match=r"^client: the name alice-1 was used already"):
        add_client(folder, "alice-1")


def test_all_certificates_of_one_client_are_revoked(folder):
    for name in ("alice", "alice-1", "bob"):
        add_client(folder, name)
    rotate(folder)
    files = revoke(folder, "alice")
    assert [file.name for file in files] == ["alice-1.crt", "alice-2.crt"]
    with pytest.raises(ValueError, match=r"^revoke: alice is revoked already"):
        revoke(folder, "alice")
    with pytest.raises(ValueError, match=r"^revoke: carol is not the name of a client"):
        revoke(folder, "carol")
    with pytest.raises(ValueError, match=r"^revoke: server is not the name of a client.*--rotate"):
        revoke(folder, "server")
    rotate(folder)
    server = ServerIdentity(folder)
    pems = {file.name: file.read_bytes() for file in (folder / "issued").glob("*.crt")}
    assert {name for name, pem in pems.items() if server.name_of(pem)} == {
        f"{name}-{number}.crt" for name in ("alice-1", "bob", "client") for number in (1, 2, 3)
    }


def test_rotated_clients_trust_servers_of_both_authorities(folder):
    add_client(folder, "alice")
    rotate(folder)
    add_client(folder, "bob")
    for name in ("alice", "bob"):
        files = {
            x.name: x.read_bytes() for x in (folder / "clients" / name / "authorities").iterdir()
        }
        assert files == {x.name: x.read_bytes() for x in (folder / "authorities").iterdir()}
        assert set(files) == {"1.crt", "2.crt"}


def test_certificates_are_made_only_where_the_authority_is(folder, tmp_path):
    generate(tmp_path / "other")
    os.replace(tmp_path / "other" / "authority.key", folder / "authority.key")
    for make in (rotate, lambda x: add_client(x, "alice")):
        with pytest.raises(ValueError, match=r"authority\.key must be of one authority"):
            make(folder)
    (folder / "authority.key").unlink()
    for make in (rotate, lambda x: add_client(x, "alice")):
        with pytest.raises(ValueError, match=r"authority\.key cannot be read: No such file"):
            make(folder)


def test_two_processes_take_turns_in_a_folder(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as a process that makes certificates
    thread = threading.Thread(target=rotate, args=(folder,))
    thread.start()
    thread.join(0.5)
    waits = thread.is_alive() and not (folder / "authorities" / "2.crt").exists()
    os.close(descriptor)
    thread.join()
    assert waits and (folder / "authorities" / "2.crt").exists()


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("step", range(24))
def test_a_rotation_may_end_anywhere(folder, monkeypatch, step):
    """Each step writes a file, which may be half of it then, or gives one its name."""
    add_client(folder, "alice")
    server, client = ServerIdentity(folder), ClientIdentity(folder)
    pem = (folder / "client.crt").read_bytes()
    left = [step]

    def until_killed(function):
        def call(*arguments):
            if not left[0]:
                if function is fsync:
                    os.truncate(arguments[0], 100)
                raise Killed
            left[0] -= 1
            return function(*arguments)

        return call

    fsync = os.fsync
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", until_killed(os.fsync))
        patch.setattr(os, "link", until_killed(os.link))
        patch.setattr(Path, "replace", until_killed(Path.replace))
        with pytest.raises(Killed):
            rotate(folder)
    client.look()
    assert all("of one pair" in fault for fault in [*server.look(), *client.faults()])
    assert server.name_of(pem) == "client"  # of the old authority, which is trusted
    rotate(folder)
    (folder / "authorities" / "1.crt").unlink()
    assert server.look() == [] and client.look()
    assert server.name_of(pem) is None
    for place in (folder, folder / "clients" / "alice"):
        assert ServerIdentity(folder).name_of((place / "client.crt").read_bytes())
    assert ServerIdentity(folder).look() == [] and not list(folder.rglob("*.key.new"))


def test_a_full_disk_leaves_no_part_of_a_file(folder, monkeypatch):
    before = contents(folder)

    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ValueError, match=r"^folder: .* cannot be made: No space left on device"):
        rotate(folder)
    now = contents(folder)
    assert {file: now[file] for file in now if file.name[0] != "."} == before

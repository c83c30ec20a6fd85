"""A store of one user's processes: the methods of torch's stores, and who is refused."""

import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from seqpar.comm.private_store import PrivateStore, serve_private_store
from tests.support.other_user import NOBODY, as_root

KEEPER = """
import sys
from seqpar.comm.private_store import serve_private_store
print(serve_private_store()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def folder():
    return serve_private_store()[1]


@pytest.fixture(params=["private", "torch"])
def store(request, folder):
    """A store of ours and one of torch's, to which the same tests apply."""
    if request.param == "torch":
        return dist.TCPStore("127.0.0.1", 0, 1, True)
    return dist.PrefixStore(f"{request.node.name}/", PrivateStore(folder))


def test_what_one_sets_another_gets(store):
    assert not store.check(["key"])
    store.set("key", "value")
    assert store.check(["key"]) and not store.check(["key", "other"])
    assert store.get("key") == b"value" == store.clone().multi_get(["key"])[0]


def test_numbers_are_added(store):
    assert [store.add("count", amount) for amount in (2, 3, 0)] == [2, 5, 5]


def test_the_first_of_two_decides(store):
    assert store.compare_set("verdict", "", "first") == b"first"
    assert store.compare_set("verdict", "", "second") == b"first"
    assert store.compare_set("verdict", "first", "third") == b"third"
    assert store.compare_set("absent", "expected", "desired") == b"expected"
    assert not store.check(["absent"])


def test_a_get_waits_for_a_set(store):
    other = store.clone()
    threading.Timer(0.05, lambda: other.set("late", "value")).start()
    assert store.get("late") == b"value"


def test_a_wait_ends_after_its_timeout(store):
    with pytest.raises(dist.DistStoreError, match="wait timeout"):
        store.wait(["absent"], timedelta(milliseconds=30))
    store.set_timeout(timedelta(milliseconds=30))
    with pytest.raises(dist.DistStoreError, match="wait timeout"):
        store.get("absent")


def test_the_end_of_the_process_that_keeps_it_is_an_error():
    with subprocess.Popen(
        [sys.executable, "-c", KEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as keeper:
        folder = keeper.stdout.readline().strip()
        store = PrivateStore(folder)
        store.set("key", "value")
        keeper.kill()
    with pytest.raises(RuntimeError, match="the process that keeps the store has ended"):
        store.get("key")
    with pytest.raises(RuntimeError, match="the process that keeps the store has ended"):
        PrivateStore(folder)


WRITE = """
import os, sys
from multiprocessing.connection import Client
from seqpar.comm.private_store import PrivateStore
os.setgroups([]), os.setgid(65534), os.setuid(65534)
for attempt in (lambda: PrivateStore(sys.argv[1]), lambda: Client(sys.argv[1] + "/socket")):
    try:
        attempt()
    except PermissionError as error:
        print(error)
"""


@as_root
def test_another_user_cannot_write():
    store, folder = serve_private_store()
    command = [sys.executable, "-c", WRITE, folder]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"the store {folder!r} cannot be used: it is another user's",
        "[Errno 13] Permission denied",
    ]
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    assert Path(folder, "token").stat().st_mode & 0o777 == 0o600
    store.set("key", "value")
    assert store.get("key") == b"value"


@as_root
def test_a_folder_of_another_user_is_no_store():
    """Anyone may make one in a folder of temporary files after a launcher has ended."""
    _, folder = serve_private_store()
    PrivateStore(folder)
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match="it is another user's"):
        PrivateStore(folder)


def test_a_store_stays_in_its_folder(tmp_path, monkeypatch):
    """Each thread makes a connection of its own, when the path may lead elsewhere."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (_, first), (_, second) = serve_private_store(), serve_private_store()
    store, found = PrivateStore(first), []
    store.set("key", "first")
    PrivateStore(second).set("key", "second")
    os.rename(first, f"{first}-moved")
    os.rename(second, first)
    thread = threading.Thread(target=lambda: found.append(store.get("key")))
    thread.start()
    thread.join()
    os.rename(first, second)  # for those that remove them
    os.rename(f"{first}-moved", first)
    assert found == [b"first"]


def test_temporary_files_that_others_could_replace_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match=r"^TMPDIR must .* may be written to by other users"):
        serve_private_store()
    assert not list(tmp_path.iterdir())


def test_a_long_path_of_temporary_files_is_refused(tmp_path, monkeypatch):
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(ValueError, match=r"^TMPDIR must be shorter"):
        serve_private_store()
    assert not list(long.iterdir())


def test_a_number_is_no_value(folder):
    with pytest.raises(TypeError, match="bytes-like object is required, not 'int'"):
        PrivateStore(folder).set("key", 5)


def test_nothing_is_left_of_a_store_whose_process_has_ended():
    done = subprocess.run([sys.executable, "-c", KEEPER], input="", capture_output=True, text=True)
    folder = done.stdout.strip()
    assert done.returncode == 0 and folder and not Path(folder).exists()

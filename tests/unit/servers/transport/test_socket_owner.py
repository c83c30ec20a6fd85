"""A pool sends nothing to a Unix socket that another user may have made."""

import asyncio
import contextlib
import os
import re
import socket
import threading

import grpc
import grpc.aio
import pytest

from seqpar.core.file_owners import fault_of_folder
from seqpar.servers.server.server import Server
from seqpar.servers.transport.unix_sockets import PinnedSocket, binding, fault_of_socket
from tests.support.grpc_echo import call, echo_server
from tests.support.other_user import NOBODY, as_root, python_of_nobody
from tests.support.requests import random_request
from tests.support.servers import connect, running, same, wait_until


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
    PinnedSocket(str(path)).close()
    assert accept()
    FAULTS[fault](path)
    named = fault_of_socket(str(path))
    assert named is not None and named.startswith((f"{path} ", f"{path.parent} "))
    with connect(f"ipc://{path}", deadlines={"connect": 0.3}) as pool:
        assert pool.report().servers[0].reason == named
        with pytest.raises(OSError, match=re.escape(named)):
            PinnedSocket(str(path))
        assert not accept()


@as_root
def test_a_link_of_another_user_is_not_followed(tmp_path):
    (tmp_path / "a").mkdir()
    link = tmp_path / "b"
    link.symlink_to(tmp_path / "a")
    assert fault_of_folder(str(link / "s")) is None
    os.lchown(link, NOBODY, NOBODY)
    assert fault_of_folder(str(link / "s")) == f"{link} belongs to another user"


@as_root
def test_a_link_in_a_folder_of_another_user_is_not_followed(tmp_path):
    """It stands between two folders of this user, and its owner may replace it."""
    for name in ("ours", "theirs", "target"):
        (tmp_path / name).mkdir()
    (tmp_path / "theirs" / "b").symlink_to(tmp_path / "target")
    (tmp_path / "ours" / "a").symlink_to("../theirs/b")
    path = str(tmp_path / "ours" / "a" / "s")
    assert fault_of_folder(path) is None
    give_away(tmp_path / "theirs")
    assert fault_of_folder(path) == f"{tmp_path}/theirs belongs to another user"


def test_a_circle_of_links_is_not_followed(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert "Too many levels of symbolic links" in fault_of_folder(str(tmp_path / "a" / "s"))


def test_a_sticky_folder_is_taken(tmp_path):
    tmp_path.chmod(0o1777)
    assert fault_of_folder(str(tmp_path / "s")) is None


def test_a_process_of_another_user_is_sent_nothing(tmp_path, monkeypatch):
    with running(f"ipc://{tmp_path}/s") as server:
        other = os.geteuid() + 1
        monkeypatch.setattr(
            "seqpar.servers.transport.unix_sockets.user_at", lambda connected: other
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
            bound.append(Server(f"ipc://{tmp_path}/s"))
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


@contextlib.asynccontextmanager
async def bound_server(path, answer="here"):
    """A gRPC server at a Unix socket, which holds its lock until it has stopped."""
    with contextlib.ExitStack() as until_stopped:
        with binding(str(path)) as lock:
            server = echo_server(f"ipc://{path}", lambda context: answer)
            await server.__aenter__()
        until_stopped.callback(lock.free)
        try:
            yield
        finally:
            await server.__aexit__(None, None, None)


def test_a_server_binds_for_this_user_alone(tmp_path):
    path = tmp_path / "s"

    async def bind():
        async with bound_server(path):
            assert path.stat().st_mode & 0o777 == 0o700
            file = path.stat().st_ino
            with pytest.raises(OSError, match="another server listens there"):
                async with bound_server(path):
                    pass
            (tmp_path / "s.lock").unlink()  # as if no server had a lock
            with pytest.raises(OSError, match="another server listens there"):
                async with bound_server(path):
                    pass
            assert path.stat().st_ino == file
        assert not list(tmp_path.iterdir())
        path.write_text("data")
        with pytest.raises(OSError, match="no socket"):
            async with bound_server(path):
                pass
        assert path.read_text() == "data" and [*tmp_path.iterdir()] == [path]

    asyncio.run(bind())


def test_a_server_is_refused_if_others_may_use_its_socket(tmp_path):
    path = tmp_path / "s"

    def bind():
        with binding(str(path)), socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            path.chmod(0o622)  # as a default access control list of the folder does

    with pytest.raises(OSError, match="may be used by other users"):
        bind()
    assert not (tmp_path / "s.lock").exists()


def test_a_channel_never_reaches_another_file_at_the_path(tmp_path):
    """It connects again by itself, and in a sticky folder others may bind a path that is free."""
    path = tmp_path / "s"

    async def answers():
        async with bound_server(path, "first"):
            pinned = PinnedSocket(str(path))
            found = [await call(pinned.target)]
        async with bound_server(path, "second"):
            with pytest.raises(grpc.aio.AioRpcError):
                await call(pinned.target)
            pinned.close()
            pinned = PinnedSocket(str(path))
            found.append(await call(pinned.target))
            pinned.close()
        return found

    assert asyncio.run(answers()) == ["first", "second"]


LISTEN_AS_ROOTS = """
listener.listen()
print(flush=True)
sys.stdin.readline()
"""


@as_root
def test_a_listener_of_another_user_is_refused(tmp_path):
    """The file belongs to root, who bound it; only the process that listens is another user's."""
    path = str(tmp_path / "s")
    first = "listener = socket.socket(socket.AF_UNIX); os.umask(0o77); listener.bind(sys.argv[1])\n"
    with python_of_nobody(LISTEN_AS_ROOTS, path, first=first) as other:
        other.stdout.readline()
        assert fault_of_socket(path) is None
        with pytest.raises(OSError, match="the process that listens there is another user's"):
            PinnedSocket(path)


def test_a_socket_that_cannot_be_connected_to_is_named(tmp_path):
    path = str(tmp_path / "s")
    with pytest.raises(OSError, match=f"{path}: No such file"):
        PinnedSocket(path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        os.chmod(path, 0o600)
        with pytest.raises(OSError, match="nothing listens there"):
            PinnedSocket(path)
        server.listen(0)
        PinnedSocket(path).close()
        with pytest.raises(OSError, match="more connections wait there"):  # it does not block
            PinnedSocket(path)

"""A store for the processes of one user on one host.

torch's TCPStore listens on all interfaces and accepts writes from anyone who can reach its port.
This store listens on a Unix socket, in a folder that only this user can enter. A process must also
know a token, which is a file in this folder.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import threading
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.managers import BaseManager
from multiprocessing.util import Finalize  # also runs when a child process ends
from pathlib import Path
from typing import Any

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from seqpar.core.file_owners import fault_of_folder

_MAX_PATH = 100  # bytes in the path of the Unix socket; Linux accepts 107
# A PrefixStore keeps only the C++ object of a store alive, so this list keeps the Python object.
_stores: list[PrivateStore] = []


class _Values:
    """The keys and values of a store, in the process that keeps the store. One thread serves each
    connection.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self.set(key, str(total).encode())
            return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a key to `desired` if its value is `expected`. A missing key has the value b""."""
        with self._changed:
            if self._values.get(key, b"") == expected:
                self.set(key, desired)
            return self._values.get(key, expected)

    def wait(self, keys: list[str], seconds: float) -> bool:
        """Wait until all keys exist, for at most `seconds`. Return whether they exist."""
        with self._changed:
            return self._changed.wait_for(lambda: self._values.keys() >= set(keys), seconds)


class _Connected(BaseManager): ...


_Connected.register("values")


class PrivateStore(Store):
    """A connection of this process to a store. Each thread of the process opens a separate
    connection.

    Methods raise a RuntimeError if the process that keeps the store has ended.
    """

    def __init__(self, folder: str) -> None:
        """Connect to the store in this folder.

        Raises:
            PermissionError: the folder belongs to another user, or others may enter it.
            RuntimeError: the process that keeps the store has ended.
        """
        super().__init__()
        try:
            # The folder is opened once, and its path is not used again. After the process that
            # keeps the store has ended, another user could create a folder at the same path. The
            # data from that user's store would be unpickled, which could run code.
            opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            status = os.fstat(opened)
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                reason = "it is another user's"
                raise PermissionError(f"the store {folder!r} cannot be used: {reason}")
            own = f"/proc/self/fd/{opened}"
            manager = _Connected(f"{own}/socket", Path(own, "token").read_bytes())
            manager.connect()
            self._values: Any = manager.values()  # type: ignore[attr-defined]
        except PermissionError:
            raise
        except (OSError, EOFError, AuthenticationError) as error:
            raise _lost(error) from error
        _stores.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._call("get", key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", key, amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return bytes(self._call("compare_set", key, _bytes(expected), _bytes(desired)))

    def check(self, keys: list[str]) -> bool:
        return bool(self._call("wait", keys, 0.0))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        own: timedelta = self.timeout  # type: ignore[attr-defined]
        seconds = (own if timeout is None else timeout).total_seconds()
        if not self._call("wait", keys, seconds):
            raise DistStoreError(f"wait timeout after {seconds:g} s, for the keys {keys}")

    def clone(self) -> PrivateStore:
        return self  # each thread opens a connection of its own

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._values, method)(*arguments)
        except (OSError, EOFError) as error:
            raise _lost(error) from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(memoryview(value))


def _lost(error: Exception) -> RuntimeError:
    return RuntimeError(f"the process that keeps the store has ended: {error!r}")


def serve_private_store() -> tuple[PrivateStore, str]:
    """Keep a store in this process until the process ends. Return a connection and the store's
    folder.
    """
    if (fault := fault_of_folder(f"{tempfile.gettempdir()}/store")) is not None:
        raise ValueError(f"TMPDIR must be a folder in which others cannot replace files: {fault}")
    folder = tempfile.mkdtemp(prefix="seqpar-")
    if len(os.fsencode(folder)) > _MAX_PATH:
        os.rmdir(folder)
        raise ValueError(f"TMPDIR must be shorter, for the path of a Unix socket, got {folder!r}")
    Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=0)
    token, values = Path(folder, "token"), _Values()
    token.touch(0o600)
    token.write_bytes(secrets.token_bytes(32))

    class Served(BaseManager):
        pass

    Served.register("values", lambda: values)
    server = Served(f"{folder}/socket", token.read_bytes()).get_server()
    threading.Thread(target=server.serve_forever, name="seqpar store", daemon=True).start()
    return PrivateStore(folder), folder

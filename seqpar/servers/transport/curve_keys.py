"""Keys of ZeroMQ's CURVE, with which both sides know each other and what they send is encrypted.

A folder of keys has `server.secret` and `server.public`, `client.secret` and `client.public`, and
in `trusted/` the public keys of the clients that the server takes. A server needs `server.*` and
`trusted/`, a client `client.*` and `server.public`. Secrets are readable by their owner alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import deque
from pathlib import Path
from string import ascii_letters
from typing import NamedTuple

import zmq

_SIZE = 40  # characters of a key, which are those of Z85
_CHARACTERS = set(b"0123456789" + ascii_letters.encode() + b".-:+=^!/*?&<>()[]{}@%$#")
_MOST = 1024  # bytes that are read of a file
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_MOST_REFUSED = 128  # keys that are kept until they are logged


class CurveKeys(NamedTuple):
    """The own pair of keys, and what the peer is known by.

    Attributes:
        public, secret: the own pair.
        server: for a client, the server's public key.
        trusted: for a server, the folder of the public keys of its clients.
    """

    public: bytes
    secret: bytes
    server: bytes = b""
    trusted: Path = Path()


def generate(folder: Path) -> list[Path]:
    """Make the keys of a server and of a client that it trusts; return the files.

    A ValueError says which file is there already, or cannot be written.
    """
    files = [folder / f"{who}.{kind}" for who in ("server", "client") for kind in _KINDS]
    files.append(folder / "trusted" / "client.public")
    pairs = [zmq.curve_keypair(), zmq.curve_keypair()]
    texts = [key for pair in pairs for key in pair] + [pairs[1][0]]
    try:
        for file in files:
            if os.path.lexists(file):
                raise ValueError(f"folder: {file} exists already")
        (folder / "trusted").mkdir(parents=True, exist_ok=True)
        for file, text in zip(files, texts, strict=True):
            mode = 0o600 if file.suffix == ".secret" else 0o644
            to = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(to, "wb") as opened:
                opened.write(text)
    except OSError as error:
        where = error.filename or folder
        raise ValueError(f"folder: {where} cannot be made: {error.strerror}") from None
    return files


_KINDS = ("public", "secret")


def server_keys(folder: Path) -> CurveKeys:
    """Return what a server needs of a folder, or raise a ValueError that names the file."""
    if not os.path.isdir(trusted := folder / "trusted"):
        raise ValueError(f"keys: {trusted} must be a folder of clients' public keys")
    check_folder(trusted)
    return CurveKeys(*_pair(folder, "server"), trusted=trusted)


def client_keys(folder: Path) -> CurveKeys:
    """Return what a client needs of a folder, or raise a ValueError that names the file."""
    return CurveKeys(*_pair(folder, "client"), server=_read(folder / "server.public"))


class Trusted:
    """The public keys in a folder, which come and go while a server runs.

    Attributes:
        keys: those that were there at the last look.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self.keys = folder, frozenset[bytes]()
        self._refused: deque[bytes] = deque(maxlen=_MOST_REFUSED)
        self._seen: object = None
        self.look()

    def look(self) -> None:
        """Read the folder if its files have changed.

        A folder that is missing, or that others may write to, has no keys. While the process cannot
        open any file, the keys of the last look stay: connections that use up all descriptors must
        not end every session.
        """
        try:
            os.close(os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC))
            files = sorted(self._folder.glob("*.public"))
            stats = [os.stat(file) for file in (self._folder, *files)]
        except OSError as error:
            if error.errno not in _NO_DESCRIPTORS:
                self._seen, self.keys = None, frozenset()
            return
        seen = [(x.st_ino, x.st_mtime_ns, x.st_ctime_ns, x.st_size, x.st_mode) for x in stats]
        if (files, seen) != self._seen:
            self._read_keys()
            self._seen = files, seen

    def _read_keys(self) -> None:
        keys = set()
        with contextlib.suppress(ValueError, OSError):
            check_folder(self._folder)
            for file in self._folder.glob("*.public"):
                with contextlib.suppress(ValueError):
                    keys.add(_read(file))
        self.keys = frozenset(keys)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client's key is trusted now; ZeroMQ's thread asks."""
        if trusted := trusts(self._folder, key):
            return trusted
        self._refused.append(key)
        return trusted

    def refusals(self) -> list[str]:
        """Return the keys that were refused since the last call, as far as they are kept."""
        return [self._refused.popleft().decode() for _ in range(len(self._refused))]


def check_folder(folder: Path) -> None:
    """Raise a ValueError unless only its owner or root may change a folder and those above it.

    Folders above it may let others add files, as /tmp does, but not replace them.
    """
    real = folder.resolve()
    for each in (real, *real.parents):
        _check_owner(each, os.stat(each), sticky=each != real)


def _check_owner(path: Path, status: os.stat_result, sticky: bool = False) -> None:
    writable = status.st_mode & 0o022 and not (sticky and status.st_mode & stat.S_ISVTX)
    if writable or status.st_uid not in (0, os.geteuid()):
        how = "chmod go-w, and chown to this user or root"
        raise ValueError(f"keys: {path} must be writable by its owner alone ({how})")


def trusts(folder: Path, key: bytes) -> bool:
    """Return whether a client's public key is in a folder now: keys come and go while it runs.

    A file that holds no key, one that is being written, say, is nobody's.
    """
    return key in Trusted(folder).keys


def _pair(folder: Path, who: str) -> tuple[bytes, bytes]:
    public, secret = (folder / f"{who}.{kind}" for kind in _KINDS)
    pair = _read(public), _read(secret)
    if zmq.curve_public(pair[1]) != pair[0]:
        raise ValueError(f"keys: {public} and {secret} are not of one pair")
    return pair


def _read(file: Path) -> bytes:
    """Return the key in a file, of which a secret one must be its owner's alone."""
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            mode = status.st_mode
            _check_owner(file, status)
            if file.suffix == ".secret" and stat.S_IMODE(mode) & 0o077:
                raise ValueError(f"keys: {file} must be readable by its owner alone (chmod 600)")
            key = opened.read(_MOST).strip()
    except OSError as error:
        raise ValueError(f"keys: {file} cannot be read: {error.strerror}") from None
    if len(key) != _SIZE or not set(key) <= _CHARACTERS:
        raise ValueError(f"keys: {file} must hold a key of {_SIZE} characters, as keygen makes it")
    return key

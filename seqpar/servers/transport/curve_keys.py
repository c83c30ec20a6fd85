"""Keys of ZeroMQ's CURVE, which authenticates both sides and encrypts their messages.

| in a folder of keys | needed by |
|---|---|
| `server.secret` | the server |
| `server.public` | both sides |
| `client.secret`, `client.public` | the client |
| `trusted/`, with the public keys of the clients that the server accepts | the server |

Only their owner may read the files of secret keys.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
import time
from collections import deque
from pathlib import Path
from string import ascii_letters
from typing import NamedTuple

import zmq

_SIZE = 40  # characters of a key in Z85 encoding
_CHARACTERS = set(b"0123456789" + ascii_letters.encode() + b".-:+=^!/*?&<>()[]{}@%$#")
_MOST = 1024  # bytes read from a file
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_MOST_REFUSED = 128  # refused keys kept until they are logged
_MAX_BANS = 64  # times as long as the first one
_FORGIVEN_SECONDS = 3600.0  # since the last ban
_NEVER_BANNED = -math.inf, 0.0


class CurveKeys(NamedTuple):
    """The key pair of one side, and the public keys of its peers."""

    public: bytes
    secret: bytes
    server: bytes = b""  # on a client
    trusted: Path = Path()  # on a server: the folder with the public keys of its clients


def generate(folder: Path) -> list[Path]:
    """Make key pairs for a server and for a client that it trusts; return the files.

    A ValueError names a file that exists already or that cannot be written.
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
    """Read a server's keys from a folder; a ValueError names a file that is missing or wrong."""
    if not os.path.isdir(trusted := folder / "trusted"):
        raise ValueError(f"keys: {trusted} must be a folder of clients' public keys")
    check_folder(trusted)
    return CurveKeys(*_pair(folder, "server"), trusted=trusted)


def client_keys(folder: Path) -> CurveKeys:
    """Read a client's keys from a folder; a ValueError names a file that is missing or wrong."""
    return CurveKeys(*_pair(folder, "client"), server=_read(folder / "server.public"))


class Trusted:
    """The public keys in a folder, whose files may be added and removed while a server runs."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.keys = folder, frozenset[bytes]()  # when the folder was last read
        self._refused: deque[bytes] = deque(maxlen=_MOST_REFUSED)
        self._banned: dict[bytes, tuple[float, float]] = {}  # until when, and for how long
        self._seen: object = None
        self.look()

    def look(self) -> None:
        """Read the folder if its files have changed.

        A folder that is missing, or that other users may write to, counts as empty. While the
        process has no descriptor left to open a file with, the previous keys stay valid: a client
        that uses up all descriptors with its connections must not end every session.
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

    def ban(self, key: str, seconds: float) -> None:
        """Refuse new connections of a key for some seconds, and for twice as long each next time.

        After an hour without a ban, the next one counts as the first.
        """
        now = time.monotonic()
        until, last = self._banned.get(key.encode(), _NEVER_BANNED)
        if now < until:
            return
        if now < until + _FORGIVEN_SECONDS:
            seconds = min(2 * last, _MAX_BANS * seconds)
        self._banned[key.encode()] = now + seconds, seconds

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client's key may connect now; ZeroMQ's thread calls this."""
        until, _ = self._banned.get(key, _NEVER_BANNED)
        if time.monotonic() < until:
            return False
        if trusted := trusts(self._folder, key):
            return trusted
        self._refused.append(key)
        return trusted

    def refusals(self) -> list[str]:
        """Return the keys refused since the last call, at most the last 128."""
        return [self._refused.popleft().decode() for _ in range(len(self._refused))]


def check_folder(folder: Path) -> None:
    """Raise a ValueError unless only this user or root may change a folder and its parents.

    Parents may let other users add files, as /tmp does, but not replace them.
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
    """Return whether a client's public key is in a folder now.

    Files without a valid key are ignored, for example a file that is being written.
    """
    return key in Trusted(folder).keys


def _pair(folder: Path, who: str) -> tuple[bytes, bytes]:
    public, secret = (folder / f"{who}.{kind}" for kind in _KINDS)
    pair = _read(public), _read(secret)
    if zmq.curve_public(pair[1]) != pair[0]:
        raise ValueError(f"keys: {public} and {secret} are not of one pair")
    return pair


def _read(file: Path) -> bytes:
    """Return the key in a file; only its owner may read a file with a secret key."""
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

"""Keys of ZeroMQ's CURVE, with which both sides know each other and what they send is encrypted.

A folder of keys has `server.secret` and `server.public`, `client.secret` and `client.public`, and
in `trusted/` the public keys of the clients that the server takes. A server needs `server.*` and
`trusted/`, a client `client.*` and `server.public`. Secrets are readable by their owner alone.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from string import ascii_letters
from typing import NamedTuple

import zmq

_SIZE = 40  # characters of a key, which are those of Z85
_CHARACTERS = set(b"0123456789" + ascii_letters.encode() + b".-:+=^!/*?&<>()[]{}@%$#")
_MOST = 1024  # bytes that are read of a file


class Keys(NamedTuple):
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


def server_keys(folder: Path) -> Keys:
    """Return what a server needs of a folder, or raise a ValueError that names the file."""
    if not os.path.isdir(trusted := folder / "trusted"):
        raise ValueError(f"keys: {trusted} must be a folder of clients' public keys")
    return Keys(*_pair(folder, "server"), trusted=trusted)


def client_keys(folder: Path) -> Keys:
    """Return what a client needs of a folder, or raise a ValueError that names the file."""
    return Keys(*_pair(folder, "client"), server=_read(folder / "server.public"))


def trusts(folder: Path, key: bytes) -> bool:
    """Return whether a client's public key is in a folder now: keys come and go while it runs.

    A file that holds no key, one that is being written, say, is nobody's.
    """
    for file in folder.glob("*.public"):
        with contextlib.suppress(ValueError):
            if _read(file) == key:
                return True
    return False


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
            mode = os.fstat(opened.fileno()).st_mode
            if file.suffix == ".secret" and stat.S_IMODE(mode) & 0o077:
                raise ValueError(f"keys: {file} must be readable by its owner alone (chmod 600)")
            key = opened.read(_MOST).strip()
    except OSError as error:
        raise ValueError(f"keys: {file} cannot be read: {error.strerror}") from None
    if len(key) != _SIZE or not set(key) <= _CHARACTERS:
        raise ValueError(f"keys: {file} must hold a key of {_SIZE} characters, as keygen makes it")
    return key

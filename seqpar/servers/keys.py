"""Keys of ZeroMQ's CURVE, with which both sides know each other and what they send is encrypted.

A folder of keys has `server.secret` and `server.public`, `client.secret` and `client.public`, and
in `trusted/` the public keys of the clients that the server takes. A server needs `server.*` and
`trusted/`, a client `client.*` and `server.public`. Secrets are readable by their owner alone.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

import zmq

_SIZE = 40  # characters of a key


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

    A ValueError says which file is there already.
    """
    files = [folder / f"{who}.{kind}" for who in ("server", "client") for kind in _KINDS]
    files.append(folder / "trusted" / "client.public")
    for file in files:
        if file.exists():
            raise ValueError(f"folder: {file} exists already")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trusted").mkdir(exist_ok=True)
    pairs = [zmq.curve_keypair(), zmq.curve_keypair()]
    texts = [key for pair in pairs for key in pair] + [pairs[1][0]]
    for file, text in zip(files, texts, strict=True):
        mode = 0o600 if file.suffix == ".secret" else 0o644
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as opened:
            opened.write(text)
    return files


_KINDS = ("public", "secret")


def server_keys(folder: Path) -> Keys:
    """Return what a server needs of a folder, or raise a ValueError that names the file."""
    if not (trusted := folder / "trusted").is_dir():
        raise ValueError(f"keys: {trusted} must be a folder of clients' public keys")
    return Keys(*_pair(folder, "server"), trusted=trusted)


def client_keys(folder: Path) -> Keys:
    """Return what a client needs of a folder, or raise a ValueError that names the file."""
    return Keys(*_pair(folder, "client"), server=_read(folder / "server.public"))


def trusts(folder: Path, key: bytes) -> bool:
    """Return whether a client's public key is in a folder now: keys come and go while it runs."""
    return any(_read(file) == key for file in folder.glob("*.public"))


def _pair(folder: Path, who: str) -> tuple[bytes, bytes]:
    public, secret = (folder / f"{who}.{kind}" for kind in _KINDS)
    if secret.exists() and stat.S_IMODE(secret.stat().st_mode) & 0o077:
        raise ValueError(f"keys: {secret} must be readable by its owner alone (chmod 600)")
    return _read(public), _read(secret)


def _read(file: Path) -> bytes:
    try:
        key = file.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"keys: {file} cannot be read: {error.strerror}") from None
    if len(key) != _SIZE:
        raise ValueError(f"keys: {file} must hold a key of {_SIZE} characters")
    return key

"""The authority that signs the certificates of servers and clients.

An *authority* is a key pair that signs certificates. A *pair* is a certificate and its private key.
The folder of an authority has the files that servers and clients need (`certificates.py`), and:

| file | what it is |
|---|---|
| `authority.key` | the private key of the newest authority |
| `clients/NAME/` | the folder of keys of the client NAME, which you copy to this client |
| `issued/NAME-N.crt` | each certificate that authority N has signed, so that it can be revoked |

An authority is valid for ten years, and its certificates are valid for one year. Only `rotate`
changes existing files: it replaces certificates and private keys. A process that reads a pair
during the replacement keeps the old pair until both new files are complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from seqpar.servers.transport.certificates import SERVER_NAME, is_pair, load, refuse_curve_keys
from seqpar.servers.transport.key_files import read, shown
from seqpar.servers.wire.texts import printable

AUTHORITY_DAYS, DAYS = 3653, 365
# Certificates are valid from this long ago, for machines whose clocks are behind.
_EARLIER = timedelta(hours=1)
_MOST_NAME_CHARACTERS = 32
_FOLDERS = ["authorities", "issued", "revoked"]
_PAIRS = ["server.crt", "server.key", "client.crt", "client.key"]


class _Authority(NamedTuple):
    number: int  # the number in the name of the authority's file
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def generate(folder: Path) -> list[Path]:
    """Make an authority, and a certificate with its private key for the server and for a client
    with the name `client`.

    Returns the new files. Raises a ValueError if a file exists already or cannot be written.
    """
    with _errors_named(folder):
        refuse_curve_keys(folder)
        for name in (*_FOLDERS, *_PAIRS, "authority.key", "clients"):
            if os.path.lexists(folder / name):
                raise ValueError(f"folder: {shown(folder / name)} exists already")
        for name in _FOLDERS:
            _make_folder(folder / name)
    with _errors_named(folder), _locked(folder):
        authority = _new_authority(1)
        files = [folder / "authorities" / "1.crt", folder / "authority.key"]
        _write(files[0], _pem(authority.certificate))
        _write(files[1], _pem(authority.key))
        return [*files, *_issue(folder, authority, "server"), *_issue(folder, authority, "client")]


def add_client(folder: Path, name: str) -> list[Path]:
    """Make a folder of keys for one more client, and return the files that were made."""
    if not re.fullmatch(rf"[A-Za-z0-9][\w.-]{{0,{_MOST_NAME_CHARACTERS - 1}}}", name, re.ASCII):
        what = f"1 to {_MOST_NAME_CHARACTERS} letters, digits, '-', '_' and '.'"
        raise ValueError(f"client must be a name of {what}, got {name!r}")
    with _errors_named(folder), _locked(folder):
        authority = _authority(folder)
        if _issued(folder, name):
            how = "choose another one, or renew all certificates with --rotate"
            raise ValueError(f"client: the name {name} was used already; {how}")
        if os.path.lexists(place := _place(folder, name)):
            raise ValueError(f"folder: {shown(place)} exists already")
        made = _trust(folder, place)
        return [*made, *_issue(folder, authority, name)]


def rotate(folder: Path) -> list[Path]:
    """Make a new authority, which signs a new certificate for each name that is not revoked.

    The old authorities stay trusted until you remove their files. Returns the new files, without
    `authority.key`.
    """
    with _errors_named(folder), _locked(folder):
        _authority(folder)
        names = sorted({_name_in(file) for file in (folder / "issued").glob("*.crt")})
        names = [name for name in names if not _is_revoked(folder, name)]
        authority = _new_authority(max(int(x.stem) for x in _authorities(folder)) + 1)
        made = [folder / "authorities" / f"{authority.number}.crt"]
        _write(made[0], _pem(authority.certificate))
        # Clients must trust the new authority before a server uses a certificate that it has
        # signed.
        for name in names:
            made += _trust(folder, _place(folder, name))
        _replace({folder / "authority.key": _pem(authority.key)})
        for name in names:
            made += _issue(folder, authority, name)
        return made


def revoke(folder: Path, name: str) -> list[Path]:
    """Revoke all certificates of a client, by copying them to the folder `revoked`.

    Returns the new files in `revoked`.
    """
    with _errors_named(folder), _locked(folder):
        files = _issued(folder, name)
        if name == "server" or not files:
            how = "make new certificates with --rotate and remove the old authority"
            why = f"clients do not read a list of revoked servers; {how}"
            why = why if name == "server" else "no client has this name"
            raise ValueError(f"revoke: {printable(name)} is not the name of a client: {why}")
        files = [x for x in files if not os.path.lexists(folder / "revoked" / x.name)]
        if not files:
            raise ValueError(f"revoke: {name} is revoked already")
        for file in files:
            _write(folder / "revoked" / file.name, read(file))
        return [folder / "revoked" / file.name for file in files]


@contextlib.contextmanager
def _errors_named(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = shown(Path(error.filename or folder))
        raise ValueError(f"folder: {where} cannot be made: {error.strerror}") from None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder, so that only one process at a time makes certificates in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _authorities(folder: Path) -> list[Path]:
    return [x for x in (folder / "authorities").glob("*.crt") if x.stem.isdecimal()]


def _authority(folder: Path) -> _Authority:
    key = read(folder / "authority.key")
    for file in _authorities(folder):
        certificate = load(file, "authority")
        if is_pair(certificate, key):
            private = load_pem_private_key(key, None)
            assert isinstance(private, ec.EllipticCurvePrivateKey)
            return _Authority(int(file.stem), certificate, private)
    names = f"{shown(folder / 'authorities')} and {shown(folder / 'authority.key')}"
    raise ValueError(f"keys: {names} must be of one authority")


def _issued(folder: Path, name: str) -> list[Path]:
    return sorted(x for x in (folder / "issued").glob("*.crt") if _name_in(x) == name)


def _name_in(issued: Path) -> str:
    return issued.stem.rpartition("-")[0]


def _is_revoked(folder: Path, name: str) -> bool:
    return all((folder / "revoked" / file.name).exists() for file in _issued(folder, name))


def _place(folder: Path, name: str) -> Path:
    return folder if name in ("server", "client") else folder / "clients" / name


def _trust(folder: Path, place: Path) -> list[Path]:
    """Copy all authorities that are missing in a client's folder to this folder. Returns the
    copies.
    """
    _make_folder(place / "authorities")
    made = []
    for file in _authorities(folder):
        copy = place / "authorities" / file.name
        if not os.path.lexists(copy):
            _write(copy, read(file))
            made.append(copy)
    return made


def _new_authority(number: int) -> _Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    # With random digits, authorities of different folders have different names.
    subject = _named(f"seqpar authority {number} {os.urandom(4).hex()}")
    builder = _builder(subject, subject, key, AUTHORITY_DAYS)
    return _Authority(number, builder.sign(key, hashes.SHA256()), key)


def _issue(folder: Path, authority: _Authority, name: str) -> list[Path]:
    """Make a certificate and its private key for a name, record the certificate in `issued`, and
    replace the old files of the name.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_named(name), authority.certificate.subject, key, DAYS)
    if name == "server":
        use, file = ExtendedKeyUsageOID.SERVER_AUTH, folder / "server.crt"
        names = x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)])
        builder = builder.add_extension(names, critical=False)
    else:
        use, file = ExtendedKeyUsageOID.CLIENT_AUTH, _place(folder, name) / "client.crt"
    builder = builder.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
    certificate = builder.sign(authority.key, hashes.SHA256())
    record = folder / "issued" / f"{name}-{authority.number}.crt"
    # The record is written first, because a certificate without a record could not be revoked.
    _write(record, _pem(certificate))
    _replace({file.with_suffix(".key"): _pem(key), file: _pem(certificate)})
    return [record, file, file.with_suffix(".key")]


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now, signs = datetime.now(UTC), subject == issuer
    usage = x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer)
    builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - _EARLIER).not_valid_after(now + timedelta(days))
    constraints = x509.BasicConstraints(ca=signs, path_length=0 if signs else None)
    return builder.add_extension(constraints, critical=True).add_extension(usage, critical=True)


def _pem(what: x509.Certificate | ec.EllipticCurvePrivateKey) -> bytes:
    if isinstance(what, x509.Certificate):
        return what.public_bytes(Encoding.PEM)
    return what.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _make_folder(folder: Path) -> None:
    """Make a folder and the missing folders above it. Only this user can write to the new
    folders.
    """
    for each in reversed((folder, *folder.parents)):
        with contextlib.suppress(FileExistsError):
            each.mkdir(mode=0o755)


def _write(file: Path, content: bytes) -> None:
    new = _write_beside(file, content)
    try:
        os.link(new, file)
    finally:
        new.unlink()


def _replace(contents: dict[Path, bytes]) -> None:
    """Replace files. All new files are complete before the first file is replaced."""
    new = {file: _write_beside(file, content) for file, content in contents.items()}
    for file in contents:
        new[file].replace(file)


def _write_beside(file: Path, content: bytes) -> Path:
    new = file.with_name(f".{file.name}.new")
    new.unlink(missing_ok=True)  # a process that was killed can have left this file
    mode = 0o644 if file.suffix == ".crt" else 0o600
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(descriptor)
    return new

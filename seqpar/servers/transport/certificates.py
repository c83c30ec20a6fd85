"""The certificates of attention servers and clients, which authenticate each other with TLS.

A folder of keys holds these files, in PEM format. `authority.py` makes them.

| file | what it is | needed by |
|---|---|---|
| `authorities/*.crt` | the authorities whose certificates are accepted | both sides |
| `server.crt`, `server.key` | a server's certificate and its private key | the server |
| `revoked/*.crt` | the certificates of clients that are no longer accepted | the server |
| `client.crt`, `client.key` | a client's certificate and its private key | the client |

A *pair* is a certificate and its private key. An *identity* is an object with the files of one
side, a server or a client. While a process runs, its identity reads files that have changed:

* If a file becomes unusable, the process keeps the file's earlier content, and reports a *fault*,
  which is a text for a log. A new file that is unusable is skipped. A file is unusable if it is
  incomplete, a fifo, a directory or a dangling link, or if it is a private key that does not belong
  to its certificate.
* An authority is trusted until its file is removed from `authorities/`. A certificate is revoked
  until its file is removed from `revoked/`. If a folder cannot be read, the process keeps the
  folder's earlier content. For example, a folder cannot be read if it was removed, or if the
  process has no free file descriptor.
* Files whose names begin with a dot are ignored. Each further file in `authorities/` or `revoked/`
  whose name does not end in `.crt` is reported as a fault, because somebody may rely on it.

Only this user and root must be able to write the files and their folders, and no other user must be
able to read a private key. If the permissions are wrong, a process does not start, and a running
process reports a fault.

TLS makes no new connection with an expired certificate, and a server also refuses an expired
certificate on existing connections. From 30 days before a certificate expires, this is reported as
a fault.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from seqpar.servers.transport.key_files import Unsafe, Watched, check_folder, read, shown

_Pair = tuple[x509.Certificate, bytes]  # a certificate, and its private key in PEM format
SERVER_NAME = "server.seqpar"  # the name in the certificate of each server; clients require it
_MOST_NAME_CHARACTERS = 64  # the limit of RFC 5280 for a Common Name
_MOST_NAMES = 1024  # how many verified certificates are remembered
_WARNING = timedelta(days=30)  # warnings begin this long before a certificate expires
_NEVER = datetime.min.replace(tzinfo=UTC)
_NOBODY = None, _NEVER, _NEVER
_OWNERS = {
    "authority": "an authority",
    "server": f"a server, with the name {SERVER_NAME}",
    "client": "a client",
}


def load(file: Path, use: str) -> x509.Certificate:
    """Return the certificate in a file, or raise a ValueError that names the file.

    `use` is the required use of the certificate: "authority", "server", "client" or "any".
    """
    pem = read(file)
    try:
        return _parse(pem, use)
    except ValueError as error:
        raise ValueError(f"keys: {shown(file)} {error}") from None


def _parse(pem: bytes, use: str) -> x509.Certificate:
    try:
        (certificate,) = x509.load_pem_x509_certificates(pem)
        _ = certificate.issuer, certificate.subject, certificate.not_valid_after_utc
        fits = use == "any" or _fits(certificate.extensions, use)
    except Exception:  # bytes that are not a certificate raise errors of many types
        raise ValueError("must hold one certificate, as keygen makes it") from None
    if not fits:
        raise ValueError(f"must hold the certificate of {_OWNERS[use]}")
    return certificate


def _fits(extensions: x509.Extensions, use: str) -> bool:
    try:
        if use == "authority":
            return extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        uses = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        if use == "client":
            return ExtendedKeyUsageOID.CLIENT_AUTH in uses
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    named = SERVER_NAME in names.get_values_for_type(x509.DNSName)
    return named and ExtendedKeyUsageOID.SERVER_AUTH in uses


def is_pair(certificate: x509.Certificate, key: bytes) -> bool:
    """Return whether a private key in PEM format belongs to a certificate."""
    try:
        return load_pem_private_key(key, None).public_key() == certificate.public_key()
    except Exception:  # bytes that are not a key raise errors of many types
        return False


def refuse_curve_keys(folder: Path) -> None:
    """Raise a ValueError if a folder contains keys of ZeroMQ's CURVE, which earlier versions
    used.
    """
    for old in [x for kind in ("*.secret", "*.public", "trusted/*") for x in folder.glob(kind)]:
        how = "make certificates, which replace it: `python -m seqpar keygen NEWFOLDER`"
        raise ValueError(f"keys: {shown(old)} is a CURVE key of an earlier version; {how}")


def _id(certificate: x509.Certificate) -> tuple[x509.Name, int]:
    return certificate.issuer, certificate.serial_number


def _is_signed(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _name(certificate: x509.Certificate) -> str | None:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    name = str(names[0].value) if len(names) == 1 else ""
    return name if 0 < len(name) <= _MOST_NAME_CHARACTERS and name.isprintable() else None


def _pem(certificates: list[x509.Certificate]) -> bytes:
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in certificates)


class _Certificates:
    def __init__(self, folder: Path, use: str) -> None:
        self.folder, self._use = folder, use
        self._watched: dict[str, Watched[x509.Certificate]] = {}
        self.found: dict[Path, x509.Certificate] = {}
        self.faults: list[ValueError] = []  # the faults of single files at the last `look`
        self.look()
        for fault in self.faults:
            if isinstance(fault, Unsafe):
                raise fault

    def look(self) -> bool:
        """Read the folder again, and return whether the certificates have changed.

        If the folder cannot be read, `look` raises a ValueError, and all certificates are kept.
        """
        try:
            check_folder(self.folder)
            x = os.stat(self.folder)
            names = sorted(name for name in os.listdir(self.folder) if name[0] != ".")
            y = os.stat(self.folder)
        except OSError as error:
            what = "must be a folder of certificates"
            raise ValueError(f"keys: {shown(self.folder)} {what}: {error.strerror}") from None
        # A file was added or removed meanwhile, so the list of names can be incomplete.
        if (x.st_ino, x.st_mtime_ns) != (y.st_ino, y.st_mtime_ns):
            raise ValueError(f"keys: {shown(self.folder)} has changed while it was read")
        before, old, self._watched = self.found, self._watched, {}
        self.faults = []
        for name in names:
            watched = old.get(name) or Watched(self._load, self.folder / name)
            self._watched[name] = watched
            try:
                watched.look()
            except ValueError as error:
                self.faults.append(error)
        self.found = {x.files[0]: x.value for x in self._watched.values() if x.value is not None}
        return self.found != before

    def _load(self, file: Path) -> x509.Certificate:
        if file.suffix != ".crt":
            raise ValueError(f"keys: {shown(file)} is ignored: its name must end in .crt")
        return load(file, self._use)


class _Identity:
    """The certificate and the private key of a server or a client, and the authorities that it
    trusts.
    """

    def __init__(self, folder: Path, who: str) -> None:
        refuse_curve_keys(folder)
        self._pair = Watched(self._load_pair, folder / f"{who}.crt", folder / f"{who}.key")
        self._pair.look()
        self._authorities = _Certificates(folder / "authorities", "authority")
        if not self._authorities.found:
            faults = map(str, self._authorities.faults)
            raise ValueError("; ".join([self._no_authority(), *faults]))
        self._folders = [self._authorities]
        self._told: set[str] = set()

    def _load_pair(self, file: Path, key: Path) -> _Pair:
        certificate, secret = load(file, file.stem), read(key)
        begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if not begin <= datetime.now(UTC) <= end:
            raise ValueError(f"keys: {shown(file)} is valid only from {begin} to {end}")
        if not is_pair(certificate, secret):
            raise ValueError(f"keys: {shown(file)} and {shown(key)} must be of one pair")
        return certificate, secret

    def _no_authority(self) -> str:
        return f"keys: {shown(self._authorities.folder)} must hold an authority's certificate"

    def _own(self) -> _Pair:
        assert self._pair.value is not None  # loaded when this object was made
        return self._pair.value

    def _look(self) -> tuple[bool, list[str]]:
        """Read files that have changed.

        Returns whether certificates have changed, and all faults that exist now.
        """
        changed, faults = False, list[str]()
        parts: list[Watched[_Pair] | _Certificates] = [self._pair, *self._folders]
        for part in parts:
            try:
                changed |= part.look()
            except ValueError as error:
                faults.append(str(error))
        for folder in self._folders:
            faults += map(str, folder.faults)
        if not self._authorities.found:
            faults.append(self._no_authority())
        now = datetime.now(UTC)
        own = self._pair.files[0], self._own()[0]
        for file, certificate in (own, *self._authorities.found.items()):
            end = certificate.not_valid_after_utc
            if now > end - _WARNING:
                verb = "has ended" if now > end else "ends"
                faults.append(f"keys: {shown(file)} {verb} on {end:%Y-%m-%d}")
        return changed, faults

    def _new(self, faults: list[str]) -> list[str]:
        new = [fault for fault in faults if fault not in self._told]
        self._told = set(faults)
        return new


class ServerIdentity(_Identity):
    """The certificate and the private key of a server, the authorities that it trusts, and the
    revoked certificates.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "server")
        self._revoked = _Certificates(folder / "revoked", "any")
        self._folders.append(self._revoked)
        self._ending: set[str] = set()
        self._trusted: list[x509.Certificate] = []
        self._renew()
        if not self._trusted:
            raise ValueError(f"keys: {shown(folder / 'revoked')} must not hold all authorities")

    def _renew(self) -> None:
        self._refused = {_id(x) for x in self._revoked.found.values()}
        self._trusted = [x for x in self._authorities.found.values() if _id(x) not in self._refused]
        self._names: dict[bytes, tuple[str | None, datetime, datetime]] = {}
        # Without a trusted authority, the old configuration stays, because `name_of` then refuses
        # all clients anyway.
        if self._trusted:
            certificate, key = self._own()
            self._configuration = grpc.ssl_server_certificate_configuration(
                [(key, _pem([certificate]))], _pem(self._trusted)
            )

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials whose handshakes use the certificates that `look` has found.

        The handshakes read no files.
        """
        given = self._configuration

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Return the certificates for gRPC if they have changed since the last call, and None
            otherwise.
            """
            # gRPC crashes after thousands of handshakes if each handshake replaces the
            # configuration while other handshakes use it.
            nonlocal given
            if given is self._configuration:
                return None
            given = self._configuration
            return given

        return grpc.dynamic_ssl_server_credentials(
            given, changed, require_client_authentication=True
        )

    def look(self) -> list[str]:
        """Read files that have changed, and return the faults that are new since the last call."""
        changed, faults = self._look()
        if changed:
            self._renew()
        return self._new([*faults, *sorted(self._ending)])

    def name_of(self, pem: bytes) -> str | None:
        """Return the name in a client's certificate, or None if the certificate is not accepted
        now.
        """
        known = self._names
        if (entry := known.get(pem)) is None:
            if len(known) >= _MOST_NAMES:
                known.clear()
            entry = known[pem] = self._verify(pem)
        name, begin, end = entry
        now = datetime.now(UTC)
        if not begin <= now <= end:
            return None
        if name is not None and now > end - _WARNING:
            self._ending.add(f"keys: the certificate of client {name} ends on {end:%Y-%m-%d}")
        return name

    def _verify(self, pem: bytes) -> tuple[str | None, datetime, datetime]:
        """Verify a client's certificate.

        Returns the name in the certificate, and the times at which its validity begins and ends.
        The name is None if the certificate is not accepted.
        """
        try:
            certificate = _parse(pem, "client")
        except ValueError:
            return _NOBODY
        authorities = [x for x in self._trusted if _is_signed(certificate, x)]
        if not authorities or _id(certificate) in self._refused:
            return _NOBODY
        authority = max(authorities, key=lambda x: x.not_valid_after_utc)
        begin = max(certificate.not_valid_before_utc, authority.not_valid_before_utc)
        end = min(certificate.not_valid_after_utc, authority.not_valid_after_utc)
        return _name(certificate), begin, end


class ClientIdentity(_Identity):
    """The certificate and the private key of a client, and the authorities whose servers the client
    trusts.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "client")
        self._faults: list[str] = []
        self._renew()

    def _renew(self) -> None:
        certificate, key = self._own()
        roots = _pem(list(self._authorities.found.values()))
        self._credentials = grpc.ssl_channel_credentials(roots, key, _pem([certificate]))

    def credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials for new channels.

        A channel must set its option `grpc.ssl_target_name_override` to `SERVER_NAME`.
        """
        return self._credentials

    def look(self) -> bool:
        """Read files that have changed, and return whether the credentials are new."""
        changed, faults = self._look()
        self._faults += self._new(faults)
        # Without an authority, the old credentials are kept, because for an empty list gRPC would
        # trust its built-in authorities.
        renewed = changed and bool(self._authorities.found)
        if renewed:
            self._renew()
        return renewed

    def faults(self) -> list[str]:
        """Return the faults that `look` has found since the last call of this method."""
        faults, self._faults = self._faults, []
        return faults

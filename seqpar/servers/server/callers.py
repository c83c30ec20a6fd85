"""The identification of clients that call a server. Clients that are not trusted are refused."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from seqpar.servers.server.sessions import UntrustedError
from seqpar.servers.transport.addresses import is_own
from seqpar.servers.transport.certificates import ServerIdentity
from seqpar.servers.transport.loopback import user_of


class Caller(NamedTuple):
    """The client that makes a call."""

    name: str  # the name in the client's certificate; "" if the server uses no certificates
    certificate: bytes  # the certificate in PEM format; b"" if the server uses no certificates


class Callers:
    """Identifies callers by their certificates. If the server has no certificates, callers are
    identified by the user of a local connection.
    """

    def __init__(self, keys: ServerIdentity | None) -> None:
        self.keys = keys
        self.address = ""  # the server's address, after it was bound

    def identify(self, context: Any) -> Caller:
        """Return the client that makes a call, or raise an UntrustedError."""
        if self.keys is None:
            self.check_user(context)
            return Caller("", b"")
        certificate: bytes = context.auth_context()["x509_pem_cert"][0]
        name = self.keys.name_of(certificate)
        if name is None:
            raise UntrustedError("the client's certificate is not trusted here")
        return Caller(name, certificate)

    def trusts(self, caller: Caller) -> bool:
        return self.keys is None or self.keys.name_of(caller.certificate) == caller.name

    def check_user(self, context: Any) -> None:
        """Raise an UntrustedError if a process of a different user calls over loopback."""
        if is_own(self.address):
            return
        if user_of(context.peer(), self.address) not in (0, os.geteuid()):
            raise UntrustedError("without keys, a server on TCP serves only its own user")

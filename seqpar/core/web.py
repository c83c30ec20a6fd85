"""HTTP servers that limit the number of connections and the duration of each connection, and check
the Host of requests.
"""

from __future__ import annotations

import contextlib
import ipaddress
import select
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MAX_CONNECTIONS = 16  # simultaneous connections; further connections are closed
MAX_REQUEST_SECONDS = 10.0  # for a request to arrive, and again for its reply to be read


class Handler(BaseHTTPRequestHandler):
    """A handler for one request per connection. The Host of the request must be an address, or a
    name of this machine.
    """

    server: BoundedServer
    timeout = MAX_REQUEST_SECONDS  # between two bytes

    def parse_request(self) -> bool:
        """Read the request. Refuse the request if its Host is neither an address nor a name of this
        machine.
        """
        if not super().parse_request():
            return False
        self.close_connection = True
        self.server.extend(self.connection)
        if not self.server.is_own_name(self.headers.get("Host", "")):
            self.send_error(403, "the Host of the request is not this server's")
            return False
        return True

    def client_has_left(self) -> bool:
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        try:
            return bool(poll.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def log_message(self, *_: object) -> None: ...


_Request = socket.socket | tuple[bytes, socket.socket]  # as `socketserver` types it


class BoundedServer(ThreadingHTTPServer):
    """Serves at most `MAX_CONNECTIONS` connections, each for a limited number of seconds."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[Handler]) -> None:
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._deadlines: dict[int, threading.Timer] = {}
        self._names = {"localhost", socket.gethostname().lower(), address[0].lower()}
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def is_own_name(self, host: str) -> bool:
        """Return whether a Host is an address, or a name of this machine.

        A browser that a hostile site has tricked (DNS rebinding) sends the name of this site as the
        Host.
        """
        name = host.strip().lower()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        elif name.count(":") == 1:
            name = name.partition(":")[0]
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def process_request(self, request: _Request, client_address: object) -> None:
        """Serve a connection in a thread, or close it if there are too many connections."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            self.extend(request)
            super().process_request(request, client_address)
        except BaseException:
            self._end(request)
            raise

    def process_request_thread(self, request: _Request, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._end(request)

    def extend(self, request: object, seconds: float | None = None) -> None:
        """Set the end of a connection to `seconds` from now, by default `MAX_REQUEST_SECONDS`."""
        self._cancel(request)
        timer = threading.Timer(
            MAX_REQUEST_SECONDS if seconds is None else seconds, _cut, (request,)
        )
        timer.daemon = True
        self._deadlines[id(request)] = timer
        timer.start()

    def _cancel(self, request: object) -> None:
        if (timer := self._deadlines.pop(id(request), None)) is not None:
            timer.cancel()

    def _end(self, request: object) -> None:
        self._cancel(request)
        self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Write nothing, also if a client leaves or if the server ends the client's connection."""


def _cut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was closed
        request.shutdown(socket.SHUT_RDWR)


def serve_in_thread(server: BoundedServer) -> Callable[[], None]:
    """Run a server in a thread. Return a function that ends the thread."""
    threading.Thread(target=server.serve_forever, name="seqpar-web", daemon=True).start()

    def end() -> None:
        server.shutdown()
        server.server_close()

    return end

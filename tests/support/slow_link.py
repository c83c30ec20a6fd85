"""A slow link to a server: a proxy with a limited rate of bytes per second in each direction."""

import contextlib
import math
import selectors
import socket
import threading
import time

_BUFFER = 2**14  # bytes of a socket buffer of the proxy, and of a turn of a connection
_TICK = 0.005  # seconds


class SlowLink(threading.Thread):
    """Forwards TCP connections to a server; all connections share the rate of each direction.

    Attributes:
        address: the address at which the proxy listens.
        rate: bytes per second and direction. 0 acts like a cut cable: neither side is told.
        hold_after: the number of bytes after which a direction of a connection is held.
        passed: the numbers of bytes that were forwarded to the server, and from it.
        connections: the number of connections so far.
    """

    def __init__(self, rate, *addresses):
        super().__init__(daemon=True)
        self.rate, self.passed, self.connections = rate, [0, 0], 0
        self.hold_after = math.inf
        self._servers = [("127.0.0.1", int(x.rpartition(":")[2])) for x in addresses]
        self._listener = self._small(socket.socket())
        # A pool without keys also binds to the port, so that no other user can bind to it.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._selector, self._open = selectors.DefaultSelector(), True
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._sockets = [self._listener]
        # To the server, and from it: (from, to, bytes left to send, how many have been sent).
        self._ways = [], []

    @staticmethod
    def _small(made):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            made.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        return made

    def run(self):
        last, budgets = time.monotonic(), [0.0, 0.0]
        while self._open:
            if self._selector.select(_TICK):
                self._accept()
            time.sleep(_TICK)
            now = time.monotonic()
            for i in range(2):
                budgets[i] = min(budgets[i] + (now - last) * self.rate, 0.1 * self.rate)
                budgets[i] -= self._pass(i, budgets[i])
            last = now

    def _accept(self):
        client, _ = self._listener.accept()
        server = self._small(socket.socket())
        self._sockets += client, server
        try:
            server.connect(self._servers[self.connections % len(self._servers)])
        except ConnectionRefusedError:
            client.close()
            server.close()
            return
        self.connections += 1
        for each in (client, server):
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ways[0].append([client, server, b"", 0])
        self._ways[1].append([server, client, b"", 0])

    def _pass(self, direction, budget):
        """Forward at most `budget` bytes, with a few bytes of each connection in turn.

        Return the number of forwarded bytes.
        """
        passed, moved = 0, True
        while moved and passed < budget:
            moved = False
            for way in list(self._ways[direction]):
                count = self._turn(way)
                if count is None:
                    self._ways[direction].remove(way)
                elif count:
                    passed, moved = passed + count, True
        self.passed[direction] += passed
        return passed

    def _turn(self, way):
        """Forward a few bytes of a connection; return None if the connection has ended."""
        source, target, waiting, passed = way
        if passed >= self.hold_after:
            return 0
        try:
            if not waiting:
                waiting = source.recv(_BUFFER)
                if not waiting:
                    target.shutdown(socket.SHUT_WR)
                    return None
            sent = target.send(waiting)
        except BlockingIOError:
            sent = 0
        except OSError:
            for each in (source, target):
                each.close()
            return None
        way[2:] = waiting[sent:], passed + sent
        return sent

    def close(self):
        self._open = False
        self.join(20)
        for each in self._sockets:
            each.close()
        self._selector.close()


@contextlib.contextmanager
def slow_link(rate, *addresses):
    """Within this context, run a proxy in front of a server.

    With several addresses, connections go to the servers in turn.
    """
    link = SlowLink(rate, *addresses)
    link.start()
    try:
        yield link
    finally:
        link.close()

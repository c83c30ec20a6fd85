"""The HTTP servers of metrics and of the explorer are bounded, and know their own names."""

import contextlib
import http.client
import logging
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler

import grpc
import pytest
import torch

from seqpar.core import web
from seqpar.core.web import BoundedServer, Handler
from seqpar.explore import page_server as explorer
from seqpar.explore.question import Question
from seqpar.servers.server.audit import Audit
from seqpar.servers.server.callers import Callers
from seqpar.servers.server.sessions import UntrustedError
from seqpar.servers.wire.limits import Limits
from seqpar.servers.wire.texts import printable
from tests.support.servers import Client, running, wait_until


class Page(Handler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"a page")


@contextlib.contextmanager
def serving(server):
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def status(port, host):
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    link.request("GET", "/", headers={"Host": host})
    with contextlib.closing(link):
        return link.getresponse().status


@pytest.mark.parametrize(("host", "expected"), [
    ("127.0.0.1", 200), ("127.0.0.1:80", 200), ("localhost:80", 200), ("[::1]:80", 200),
    ("10.0.0.3:9100", 200), ("attacker.example", 403), ("localhost.attacker.example:80", 403),
    ("", 403), ("127.0.0.1.attacker.example", 403), ("0x7f000001", 403),
])  # fmt: skip
def test_the_host_must_name_this_server(host, expected):
    with serving(BoundedServer(("127.0.0.1", 0), Page)) as port:
        assert status(port, host) == expected


def test_connections_are_limited_and_cut_off(monkeypatch):
    monkeypatch.setattr(web, "MAX_REQUEST_SECONDS", 1.0)
    monkeypatch.setattr(web, "MAX_CONNECTIONS", 3)
    with serving(BoundedServer(("127.0.0.1", 0), Page)) as port, contextlib.ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(8)
        ]
        end = time.monotonic() + 20
        for each in slow:
            each.settimeout(20)
        while slow:  # each sends a byte now and then, and never ends its request
            assert time.monotonic() < end
            for each in list(slow):
                try:
                    each.sendall(b"G")
                    each.settimeout(0.05)
                    if each.recv(1) == b"":
                        slow.remove(each)
                except TimeoutError:
                    continue
                except OSError:
                    slow.remove(each)
        wait_until(lambda: _answers(port))


def _answers(port):
    with contextlib.suppress(OSError, http.client.HTTPException):
        return status(port, "localhost") == 200
    return False


def test_a_question_whose_client_has_left_is_dropped(monkeypatch):
    asked, go_on = [], threading.Event()

    def answered(query, check):
        asked.append(query)
        go_on.wait(20)
        return 200, "answered"

    monkeypatch.setattr(explorer, "answered", answered)
    assert issubclass(explorer._Handler, BaseHTTPRequestHandler)
    with serving(explorer.listening(0)) as port:
        links = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        for i, link in enumerate(links):
            link.sendall(b"GET /?q=%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % i)
            if not i:
                wait_until(lambda: asked)
        links[1].close()
        time.sleep(3 * explorer._POLL_SECONDS)
        go_on.set()
        for link in (links[0], links[2]):
            link.settimeout(20)
            assert link.recv(12) == b"HTTP/1.0 200"
            link.close()
    assert asked == ["q=0", "q=2"]


def test_a_question_is_cancelled_when_its_client_leaves(monkeypatch):
    ranks, go_on = [], threading.Event()

    class Attention:
        """Waits at the first rank."""

        def make(self, comm):
            ranks.append(comm.rank)
            go_on.wait(20)
            return lambda *_, **__: torch.zeros(1, device="meta", requires_grad=True)

    monkeypatch.setattr(Question, "candidate", lambda self: Attention())
    with serving(explorer.listening(0)) as port:
        with socket.create_connection(("127.0.0.1", port)) as link:
            link.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            wait_until(lambda: ranks)
        go_on.set()
        wait_until(lambda: not explorer._Handler.answering.locked())
    assert ranks == [0]


@pytest.mark.parametrize("text", ["a\x1b[2Jb", "a\nb", "a\r\x07b", "a\u202eb", "a\x9bb"])
def test_texts_of_peers_are_escaped(text, caplog):
    shown = printable(text)
    assert shown.isprintable() and shown[0] == "a" and shown[-1] == "b"
    Audit().write(logging.WARNING, "refused", text, text, text)
    assert caplog.records[0].getMessage() == f"refused: client {shown} {shown}: {shown}"
    assert printable("plain é") == "plain é"


def test_the_audit_log_names_sessions_refusals_and_ends(tmp_path, caplog):
    caplog.set_level(logging.INFO, "seqpar.servers.audit")
    limits = Limits(clients=1)
    with running(f"ipc://{tmp_path}/s", limits=limits) as server:
        with Client(server.address, client="a\x1b[2J") as client, pytest.raises(grpc.RpcError):
            Client(server.address, client="b")
        wait_until(lambda: not server.status().clients)
    lines = [record.getMessage() for record in caplog.records]
    assert any(x.startswith("session: client ") and x.endswith("a\\x1b[2J") for x in lines)
    full = "the server has 1 of at most 1 sessions"
    assert any(x.startswith("refused: client ") and full in x for x in lines)
    assert any(x.startswith("ended: client ") and "it has left" in x for x in lines)
    assert not any(repr(client.session)[2:-1] in x or client.session.hex() in x for x in lines)


def test_the_audit_log_names_callers_that_are_not_trusted(tmp_path, caplog, monkeypatch):
    def refuse(self, context):
        raise UntrustedError("it is another user's")

    monkeypatch.setattr(Callers, "check_user", refuse)
    with running(f"ipc://{tmp_path}/s") as server, pytest.raises(grpc.RpcError):
        Client(server.address)
    lines = [x.getMessage() for x in caplog.records if x.name == "seqpar.servers.audit"]
    assert any(x.startswith("refused: client ") and "another user's" in x for x in lines)


def test_the_audit_log_is_limited(caplog, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    audit = Audit()
    for _ in range(1000):
        audit.write(logging.WARNING, "refused", "name", "peer", "a reason")
    assert len(caplog.records) == 100
    now[0] = 60.0
    audit.write(logging.WARNING, "refused", "name", "peer", "a reason")
    assert [x.getMessage() for x in caplog.records[100:]] == [
        "900 lines were left out", "refused: client name peer: a reason",
    ]  # fmt: skip

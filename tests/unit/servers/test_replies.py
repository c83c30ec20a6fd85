"""Damaged, repeated, reordered and foreign replies of servers, and what clients make of them."""

import time

import pytest
import zmq

from seqpar.servers.pool import connection
from seqpar.servers.wire.payload import Payload
from seqpar.servers.wire.protocol import Hello, Pong, decode, encode
from tests.support.servers import connect
from tests.support.tiers import exhaustive_seeds
from tests.tools.fuzz_replies import fuzz_replies


def test_changed_replies_give_no_wrong_result():
    fuzz_replies(0, 80, right=40)


@pytest.mark.parametrize("seed", exhaustive_seeds(0, 1, 4))
def test_many_changed_replies_give_no_wrong_result(seed):
    fuzz_replies(seed, 1000)


def test_a_client_that_compares_no_checksums_is_found(monkeypatch):
    monkeypatch.setattr(Payload, "check", lambda self, buffers, expected: self.check_sizes(buffers))
    with pytest.raises(AssertionError, match=r"result was wrong"):
        fuzz_replies(0, 1000)


def test_a_handshake_without_an_answer_is_repeated(monkeypatch):
    """The answer may have been lost on its way, by a proxy or by a server that was stopped."""
    monkeypatch.setattr(connection, "_MIN_SILENCE_SECONDS", 0.1)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.linger = 0
        port = server.bind_to_random_port("tcp://127.0.0.1")
        with connect(f"tcp://127.0.0.1:{port}", deadlines={"connect": 0.1}):
            clients, end = [], time.monotonic() + 20
            while len(clients) < 2:
                assert time.monotonic() < end, "no second handshake"
                if server.poll(20):
                    route, head = server.recv_multipart()
                    assert isinstance(decode(head), Hello)
                    clients.append(route)
                elif clients:  # it lives, and has granted a lease
                    server.send_multipart([clients[-1], encode(Pong(1, 0, 0))])

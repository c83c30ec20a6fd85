"""Sequences of messages from several clients, against a model of who may see what."""

import itertools

import pytest
import zmq

from seqpar.servers.server import clients, server
from seqpar.servers.server.caches import Caches
from seqpar.servers.server.clients import Clients
from seqpar.servers.transport import server_socket
from seqpar.servers.transport.peers import Peer
from seqpar.servers.transport.server_socket import ServerSocket
from tests.support.tiers import exhaustive_seeds
from tests.tools import fuzz_sequences
from tests.tools.fuzz_sequences import Violation, fuzz_sequence


@pytest.mark.parametrize("number", range(4))
def test_no_client_reaches_another_clients_session(number):
    assert fuzz_sequence(7, number, hostile=200) > 250


@pytest.mark.parametrize("number", exhaustive_seeds(0, 7, 20))
def test_longer_sequences(number):
    fuzz_sequence(8, number)


def honour_claimed_ids(monkeypatch):
    """Let a client that comes back under another client's routing id be that client."""
    monkeypatch.setattr(zmq, "ROUTER_RAW", zmq.ROUTER_HANDOVER)


def ignore_keys(monkeypatch):
    monkeypatch.setattr(server_socket, "_key_of", lambda frame: "")
    monkeypatch.setattr(ServerSocket, "trusts", lambda *_: True)


def ignore_secrets(monkeypatch):
    monkeypatch.setattr(server, "compare_digest", lambda *_: True)


def ignore_generations(monkeypatch):
    monkeypatch.setattr(Clients, "find", lambda self, peer, generation: self.get(peer))


def find_caches_by_number(monkeypatch):
    admit = Caches.admit
    monkeypatch.setattr(
        Caches, "admit", lambda self, client, *x, **y: admit(self, Peer(b""), *x, **y)
    )


def keep_caches_of_leases_that_ended(monkeypatch):
    monkeypatch.setattr(Caches, "end", lambda *_: None)


def answer_a_number_twice(monkeypatch):
    monkeypatch.setattr(clients.ClientConnection, "use", lambda *_: True)


def send_to_another_client(monkeypatch):
    send, numbers = Clients.send, itertools.count(1)

    def sends(self, peer, *arguments, **options):
        peers = [x.peer for x in self]
        if next(numbers) % 100 == 0 and peers:
            peer = next((x for x in peers if x != peer), peer)
        return send(self, peer, *arguments, **options)

    monkeypatch.setattr(Clients, "send", sends)


def give_a_secret_again(monkeypatch):
    monkeypatch.setattr(clients.secrets, "token_bytes", lambda count: b"s" * count)


FOREIGN = (
    "of another client's session|without its secret and generation|has not asked|a wrong result"
)


@pytest.mark.parametrize(("faults", "secured", "reported"), [
    ([honour_claimed_ids, ignore_keys, ignore_secrets], True, FOREIGN),
    ([honour_claimed_ids, ignore_keys], True, FOREIGN),
    ([honour_claimed_ids, ignore_secrets], False, FOREIGN),
    ([ignore_secrets], True, FOREIGN),
    ([ignore_secrets], False, FOREIGN),
    ([ignore_generations], False, FOREIGN),
    ([find_caches_by_number], False, "received|leases, caches"),
    ([keep_caches_of_leases_that_ended], False, "received Lost|leases, caches"),
    ([answer_a_number_twice], False, "received Result|received no answer"),
    ([send_to_another_client], False, "received"),
    ([give_a_secret_again], False, "received the secret of another client's session"),
])  # fmt: skip
def test_a_planted_fault_is_found(monkeypatch, faults, secured, reported):
    for plant in faults:
        plant(monkeypatch)
    monkeypatch.setattr(fuzz_sequences, "LIMIT", 1.0)  # some faults leave a request without a reply
    with pytest.raises(Violation, match=reported):
        fuzz_sequence(0, int(secured), claims=["dead"])

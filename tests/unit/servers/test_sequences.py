"""Sequences of calls from several clients, against a model of who may see what."""

import itertools

import pytest

from seqpar.servers.server import sessions
from seqpar.servers.server.account import Account, Client
from seqpar.servers.server.caches import Caches
from seqpar.servers.server.service import Service
from seqpar.servers.server.sessions import Sessions, StaleSessionError
from tests.support.tiers import exhaustive_seeds
from tests.tools import fuzz_sequences
from tests.tools.fuzz_sequences import OWNER, Violation, fuzz_sequence


@pytest.mark.parametrize("number", exhaustive_seeds(1, 2))
def test_no_client_reaches_another_clients_session(number):
    assert fuzz_sequence(7, number, hostile=200) > 250


@pytest.mark.parametrize("number", exhaustive_seeds(0, 2))
def test_longer_sequences(number):
    fuzz_sequence(8, number)


def ignore_names(monkeypatch):
    def find(self, secret, name):
        if secret not in self._sessions:
            raise StaleSessionError
        return self._sessions[secret]

    monkeypatch.setattr(Sessions, "find", find)


def ignore_secrets(monkeypatch):
    def find(self, secret, name):
        own = [x for x in self if x.client.name == name]
        return self._sessions.get(secret, own[0])

    monkeypatch.setattr(Sessions, "find", find)


def find_caches_by_number(monkeypatch):
    admit = Caches.admit
    monkeypatch.setattr(
        Caches,
        "admit",
        lambda self, client, *x: admit(self, client if client == OWNER else Client(b"x"), *x),
    )


def keep_caches_of_sessions_that_ended(monkeypatch):
    monkeypatch.setattr(Caches, "end", lambda *_: None)


def keep_sessions_that_ended(monkeypatch):
    monkeypatch.setattr(Sessions, "end", lambda *_: None)


def keep_room_of_freed_caches(monkeypatch):
    monkeypatch.setattr(Account, "count", lambda self, name, size: _count(self, size))


def _count(account, size):
    account.held += max(0, size)


def send_another_calls_result(monkeypatch):
    reply, numbers, kept = Service._reply, itertools.count(1), []

    def replies(self, version, job, *arguments):
        kept.append((job.result, job.checksum))
        if next(numbers) % 20 == 0:
            others = [x for x in kept if [*map(len, x[0])] == [*map(len, job.result)]]
            job.result, job.checksum = others[0]
        return reply(self, version, job, *arguments)

    monkeypatch.setattr(Service, "_reply", replies)


def give_a_secret_again(monkeypatch):
    monkeypatch.setattr(sessions.secrets, "token_bytes", lambda count: b"s" * count)


NUMBERS = "sessions, caches and their bytes"


@pytest.mark.parametrize(("plant", "secured", "reported"), [
    (ignore_names, True, "may not make|another session"),
    (ignore_secrets, False, "may not make|another session"),
    (find_caches_by_number, False, "was refused|was wrong|may not make"),
    (keep_caches_of_sessions_that_ended, False, NUMBERS),
    (keep_sessions_that_ended, False, f"may not make|another session|{NUMBERS}"),
    (keep_room_of_freed_caches, False, NUMBERS),
    (send_another_calls_result, False, "a result was wrong"),
    (give_a_secret_again, False, "received the secret of another client's session"),
])  # fmt: skip
def test_a_planted_fault_is_found(monkeypatch, plant, secured, reported):
    plant(monkeypatch)
    monkeypatch.setattr(fuzz_sequences, "LIMIT", 1.0)
    with pytest.raises(Violation, match=reported):
        fuzz_sequence(0, int(secured))

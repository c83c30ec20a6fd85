"""Make calls of an attention server from several clients, and check who receives what.

Run it as `python -m tests.tools.fuzz_sequences`.

Clients submit tasks, use caches, cancel calls, leave and come back. In between they make hostile
calls: damaged requests, requests that any client has made before, and requests with the secret or a
cache of another session. They know the secrets of all sessions.

A model knows which sessions live, and the certificate to which each session belongs. A request is
accepted only with the secret of a living session, and only from the certificate of this session. It
then counts as a request of the session, even if another client makes it. The model computes the
caches of each session without the other sessions, so each call has one right outcome. The model
also compares the server's numbers with its own numbers. The call of one client must not end a
session or cache of another client, and no session or cache may remain in the end.

Each sequence has a new server. Odd sequences have keys. Without keys, all clients count as one
certificate. Sequence i of a seed makes the same calls in every run, so `--only i` repeats it.
"""

import argparse
import contextlib
import functools
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import grpc
import numpy as np
import torch

from seqpar.servers.server import service
from seqpar.servers.server.account import Client as Owner
from seqpar.servers.server.audit import AUDIT
from seqpar.servers.server.caches import Caches
from seqpar.servers.transport.authority import add_client, generate
from seqpar.servers.transport.certificates import ClientIdentity, ServerIdentity
from seqpar.servers.wire.codec import pack
from seqpar.servers.wire.limits import Limits, ServerDeadlines
from seqpar.servers.wire.payload import RequestError, bytes_of
from tests.support.changed import changed
from tests.support.requests import random_request
from tests.support.servers import Client, running
from tests.tools.fuzz_protocol import (
    CPU,
    VERSION,
    choose,
    damage,
    messages_of,
    read,
    replies_of,
    result_of,
    step,
)

HOSTILE_PER_SEQUENCE = 1000
NAMES = ["client", "second", "third"]  # the names of certificates
CLIENTS = 5
CACHES = 3  # all clients use these numbers of caches
LIMIT = 20.0  # seconds within which the server's numbers must be those of the model
MOST_KEPT = 64  # the most requests that are kept to be made again
MOST_FLYING = 6  # the most calls in flight, whose outcomes are not checked yet
MOST_ROWS = 200  # the most rows of a cache
OWNER = Owner(b"")
LIMITS = Limits(tokens=4096, bytes=2**24, cache_bytes=2**30, requests=2**16, clients=1024)
KINDS = {  # kind of call: its relative frequency
    "task": 5, "step": 10, "free": 1, "cancel": 1, "leave": 0.7,
    "damaged": 10, "stolen": 16, "replayed": 8, "stolen free": 2,
}  # fmt: skip
HOSTILE = {"damaged", "stolen", "replayed", "stolen free"}


class Violation(AssertionError):
    """A client received what belongs to another client, or lost what belongs to it."""


@functools.cache
def packed_task(i):
    return pack(random_request(i, 8 + i % 3, 16, dim=4))


class Session:
    """A session as the model knows it."""

    def __init__(self, client, name):
        self.client, self.secret, self.name = client, client.session, name
        self.caches = Caches(LIMITS.cache_bytes, CPU, "default")
        self.lives = True
        self.doubtful = []  # caches that may or may not begin: their steps were cancelled

    def cache(self, number):
        return self.caches._caches.get(OWNER, {}).get(number)


class World:
    """A server and its clients.

    Attributes:
        hostile: how many hostile calls were made.
        calls: how many calls were made in all.
    """

    def __init__(self, seed, number):
        self.random = np.random.default_rng((seed, number))
        self.secured = bool(number % 2)
        self.sessions, self.clients = [], []  # all sessions; sessions of living clients
        self.kept = deque(maxlen=MOST_KEPT)
        self._flying = deque()  # calls, their right results, and whether they should succeed
        self.hostile = self.calls = 0

    @contextlib.contextmanager
    def serving(self, folder):
        options = {}
        self._keys = dict.fromkeys(NAMES)
        if self.secured:
            keys = Path(folder) / "keys"
            generate(keys)
            options["keys"] = ServerIdentity(keys)
            for name in NAMES[1:]:
                add_client(keys, name)
            folders = [keys, *(keys / "clients" / name for name in NAMES[1:])]
            self._keys = {x: ClientIdentity(y) for x, y in zip(NAMES, folders, strict=True)}
        deadlines = ServerDeadlines(idle=600.0, request=600.0)
        self._address = f"ipc://{folder}/s"
        with (
            changed(AUDIT, disabled=True),
            changed(
                service, _OPEN_CALLS=2**20, _ALL_OPEN_CALLS=2**20
            ),  # so that the server reads all requests of a call
            running(self._address, limits=LIMITS, deadlines=deadlines, **options) as self.server,
        ):
            try:
                for _ in range(CLIENTS):
                    self._begin()
                yield
            finally:
                for session in self.clients:
                    session.client.close()

    def _begin(self):
        """Let a new client come, with any certificate."""
        name = choose(self.random, NAMES)
        session = Session(Client(self._address, self._keys[name]), name if self.secured else "")
        if any(x.secret == session.secret for x in self.sessions):
            raise Violation("a client received the secret of another client's session")
        self.sessions.append(session)
        self.clients.append(session)

    def round(self):
        """Let a client make some calls, check their outcomes, and check the server's numbers."""
        weights = np.array(list(KINDS.values())) / sum(KINDS.values())
        for _ in range(int(self.random.integers(1, 16))):
            caller = choose(self.random, self.clients)
            kind = str(self.random.choice(list(KINDS), p=weights))
            self.calls += 1
            self.hostile += kind in HOSTILE
            self._act(caller, kind)
        self._settle()
        self.check_numbers()

    def _act(self, caller, kind):
        if kind == "leave":
            self._leave(caller)
        elif kind == "cancel":
            self._cancel(caller)
        elif kind in ("free", "stolen free"):
            target = caller if kind == "free" else choose(self.random, self.sessions[-16:])
            self._free(caller, target)
        else:
            self._compute(caller, self._messages(caller, kind))

    def _messages(self, caller, kind):
        """Return the messages of a request."""
        if kind == "replayed" and self.kept:
            return choose(self.random, self.kept)
        target = caller
        if kind == "stolen":
            target = choose(self.random, self.sessions[-16:])
        is_task = kind == "task" or (kind != "step" and not self.random.integers(3))
        packed = packed_task(int(self.random.integers(8))) if is_task else self._step(target)
        # A thief also makes a step of another session on its own cache of the same number.
        secret = choose(self.random, [target, target, caller]).secret
        messages = messages_of(packed, secret)
        if kind == "damaged":
            return damage(self.random, messages)
        self.kept.append(messages)
        return messages

    def _step(self, session):
        """Return the next step of one of a session's caches."""
        number = int(self.random.integers(CACHES))
        cache = session.cache(number)
        writes, start = (0, 0) if cache is None else (cache.writes, cache.length)
        start = max(0, start - int(self.random.integers(3))) if start < MOST_ROWS else 0
        queries, rows = self.random.integers(1, 5, 2).tolist()
        seed = int(self.random.integers(2**30))
        return step(seed, writes, start, queries, max(queries, rows), number)

    def _reached(self, caller, secret):
        """Return the session that a caller's request with this secret reaches, or None."""
        found = (x for x in self.sessions if x.secret == secret and x.lives)
        session = next(found, None)
        return session if session is not None and session.name == caller.name else None

    def _compute(self, caller, messages):
        """Make a call of Compute. The outcome of a step is checked now, other outcomes may be
        later."""
        call = caller.client.compute(messages)
        expected, left, are_tasks = [], messages, True
        with contextlib.suppress(RequestError):
            secret = VERSION.read_request(messages[0])[0].session if messages else b""
            session = self._reached(caller, secret)
            while session is not None and (left or not expected):
                header, parts, left = read(left, secret, LIMITS)
                are_tasks &= header.step is None
                expected += bytes_of(result_of(header, parts, session.caches, OWNER))
            left = left if session is None else None
        self._flying.append((call, b"".join(x.tobytes() for x in expected), left is None))
        if len(self._flying) > MOST_FLYING or not are_tasks:
            self._settle()

    def _settle(self):
        """Check the outcomes of all calls in flight."""
        while self._flying:
            self._check(*self._flying.popleft())

    def _check(self, call, expected, is_right):
        data, error = replies_of(call)
        if error is not None and is_right:
            raise Violation(f"a right request was refused: {error.details()}")
        if error is None and not is_right:
            raise Violation("a request was accepted that its caller may not make")
        if data != expected:
            raise Violation("a result was wrong")

    def _free(self, caller, target):
        number = int(self.random.integers(CACHES))
        freed = caller.client.free(number, target.secret) == grpc.StatusCode.OK
        if freed and self._reached(caller, target.secret) is None:
            raise Violation("a client has freed a cache of another session")
        if not freed:
            if self._reached(caller, target.secret) is not None:
                raise Violation("a cache was not freed")
            return
        target.caches.free(OWNER, number)

    def _cancel(self, caller):
        """Cancel calls that the server may or may not have begun."""
        number = CACHES + len(caller.doubtful)  # a cache that no other call uses
        for packed in (packed_task(0), step(0, 0, 0, 4, 4, number)):
            call = caller.client.compute(messages_of(packed, caller.secret))
            if self.random.integers(2):
                next(call)
            call.cancel()
        caller.doubtful.append(number)

    def _leave(self, caller):
        """Let a client leave with calls in flight, and let a new client come."""
        self._settle()
        for _ in range(int(self.random.integers(3))):
            packed = packed_task(int(self.random.integers(8)))
            caller.client.compute(messages_of(packed, caller.secret))
        caller.client.close()
        caller.lives = False
        self.clients.remove(caller)
        self.check_numbers()
        self._begin()

    def _counts(self):
        """Return the server's numbers of sessions, caches and bytes of caches."""
        status = self.server.status()
        return status.clients, status.caches, status.cache_bytes

    def _expected(self):
        live = [session.caches for session in self.clients]
        return len(live), sum(map(len, live)), sum(x.account.held for x in live)

    def check_numbers(self):
        """Compare the server's sessions and caches with those of the model."""
        end = time.monotonic() + LIMIT
        while (found := self._counts()) != (expected := self._expected()):
            if time.monotonic() > end:
                raise Violation(f"sessions, caches and their bytes: {found}, not {expected}")
            for session in self.clients:
                for number in session.doubtful:
                    session.client.free(number)
            time.sleep(0.002)

    def end(self):
        """Let all clients leave, and check that the server keeps nothing of them."""
        for session in self.clients:
            session.client.close()
        self.clients.clear()
        self.check_numbers()
        ours, end = self.server._service, time.monotonic() + LIMIT
        while ours.account.held or ours.worker.waiting:
            if time.monotonic() > end:
                raise Violation("requests of clients that have left remain")
            time.sleep(0.01)


def fuzz_sequence(seed, number, hostile=HOSTILE_PER_SEQUENCE):
    """Run sequence `number` until it has made `hostile` hostile calls; return the number of all
    calls."""
    world = World(seed, number)
    with tempfile.TemporaryDirectory() as folder, world.serving(folder):
        while world.hostile < hostile:
            world.round()
        world.end()
    return world.calls


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000, help="hostile ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.only is not None:
        print(fuzz_sequence(arguments.seed, arguments.only), "calls")
        return 0
    sequences, calls, start = -(-arguments.messages // HOSTILE_PER_SEQUENCE), 0, time.monotonic()
    for number in range(sequences):
        try:
            calls += fuzz_sequence(arguments.seed, number)
        except BaseException:
            print(f"sequence {number} has failed: repeat it with --only {number}")
            raise
        if number % max(1, sequences // 20) == 0 or number + 1 == sequences:
            hostile, seconds = (number + 1) * HOSTILE_PER_SEQUENCE, time.monotonic() - start
            print(f"{hostile} hostile calls of {calls}, {seconds:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Send an attention server messages from several clients, and check who receives what.

Run it as `python -m tests.tools.fuzz_sequences`.

Clients have tasks computed, keep caches, leave, and come back under another client's routing id.
In between they send hostile messages: damaged ones, ones sent before by any client, and ones with
another session's secret, generation, cache or request. They know all secrets of all sessions.

A model knows which session each connection has. A message is accepted only with the secret and the
generation of the session of its own connection. Each session's caches are computed again without
other clients, so each reply has one right value. A reply that the model does not expect is an
error, and so is a session or a cache that ends with another client's message.

Each sequence has a server of its own, with or without keys. Sequence i of a seed sends the same
messages in every run, so that `--only i` repeats it.
"""

import argparse
import contextlib
import functools
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

import msgspec
import numpy as np
import torch
import zmq

from seqpar.servers.server import server, worker
from seqpar.servers.server.caches import Caches
from seqpar.servers.server.clients import AUDIT
from seqpar.servers.server.compute import compute
from seqpar.servers.transport.curve_keys import client_keys, generate, server_keys
from seqpar.servers.transport.peers import Peer
from seqpar.servers.transport.sockets import secure
from seqpar.servers.transport.zeromq import Frames, TransportError
from seqpar.servers.wire import protocol
from seqpar.servers.wire.codec import pack, unpack
from seqpar.servers.wire.header import form_of
from seqpar.servers.wire.limits import Limits, ServerDeadlines
from seqpar.servers.wire.payload import RequestError, bytes_of
from seqpar.servers.wire.protocol import (
    ProtocolError,
    StepRequest,
    Task,
    decode,
    encode,
    library_version,
    session_of,
)
from tests.support.changed import changed
from tests.support.requests import random_request
from tests.support.servers import running
from tests.tools.fuzz_protocol import LIMITS, damage, step

HOSTILE_PER_SEQUENCE = 1000
CLIENTS, KEYS = 5, 3
CACHES = 3  # numbers that all clients use for theirs
LIMIT = 20.0  # seconds within which every reply arrives
MOST_ASKED = 8  # requests of a session without a reply
MOST_KEPT = 64  # messages that may be sent again
CPU = torch.device("cpu")
REQUESTS = [random_request(seed, 8 + seed % 3, 16, dim=4) for seed in range(8)]
REFUSED = protocol.Failed | protocol.Busy | protocol.Lost
KINDS = {  # of messages, with how often each is sent
    "task": 5, "step": 10, "ping": 1, "free": 0.5, "cancel": 1, "hello": 0.2, "goodbye": 0.2,
    "leave": 0.8, "damaged": 10, "stolen": 16, "replayed": 8, "of no kind": 1,
}  # fmt: skip
HOSTILE = {"damaged", "stolen", "replayed", "of no kind"}


class Violation(AssertionError):
    """A client received what is not its own, or lost what is."""


@functools.cache
def packed_request(i):
    return pack(REQUESTS[i])


class Session:
    """A lease as the model knows it: what its client has asked for, and its caches."""

    def __init__(self, welcome):
        self.secret, self.generation = welcome.secret, welcome.generation
        self.caches = Caches(LIMITS.cache_bytes, CPU, "default")
        self.ended = False
        self.cancelled = set()  # caches with a step that may not have been computed
        self._last, self._used = 0, set()

    def next_number(self):
        return self._last + 1

    def use(self, number):
        """Whether a request's number is new."""
        new = number > max(0, self._last - 1024) and number not in self._used
        self._used.add(number)
        self._last = max(self._last, number)
        return new

    def expected(self, message, frames):
        """The parts of a request's result, or None if it must be refused."""
        if not self.use(message.request):
            return None
        try:
            form = form_of(message)
            form.check(LIMITS)
            if message.place is not None or message.result_place is not None:
                return None
            buffers = Frames().read(None, frames, form.request.sizes, None)
            if isinstance(message, StepRequest):
                tensors = self.caches.admit(Peer(b""), message, buffers).compute()
            else:
                tensors = compute([unpack(message, buffers, "default")], CPU)[0]
        except (RequestError, TransportError):
            return None
        return [x.tobytes() for x in bytes_of(tensors)]

    def cache(self, number):
        return self.caches._caches.get(Peer(b""), {}).get(number)


class Connection:
    """A client's connection, which may have claimed a routing id, and what it may receive."""

    def __init__(self, world, key, claimed):
        self.world, self.key, self.claimed = world, key, claimed
        self.session = None
        self.sessions = {}  # of this connection, by generation
        self.said = set()  # generations in its messages
        self.replies = deque()  # that must come in this order: their types and values
        self.asked = {}  # (generation, request) -> the session, header, expected parts, certain
        self.socket = world.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.routing_id = claimed
        secure(self.socket, world.keys[key])
        self.socket.connect(world.address)

    def send(self, frames):
        """Send a message, and note which replies it must have."""
        self._note(frames)
        self.socket.send_multipart(frames)
        if self.replies and self.replies[-1][0] == _TO_HELLO:
            self.settle()  # what follows needs the secret

    def _note(self, frames):
        try:
            message = decode(frames[0])
        except ProtocolError as error:
            other = isinstance(error, protocol.VersionMismatch)
            self.replies.append((protocol.Refused if other else protocol.Malformed, None))
            return
        generation, session = getattr(message, "generation", None), self.session
        if isinstance(message, protocol.Hello):
            self.end()
            self.replies.append((_TO_HELLO, None))
        elif isinstance(message, protocol.StatusRequest):
            self.replies.append((protocol.Status, None))
        elif isinstance(message, protocol.Knock):
            pass
        elif not isinstance(message, _TO_A_SERVER):
            self.replies.append((protocol.Malformed, None))
        elif (
            session is None
            or session.secret != session_of(frames[0])
            or session.generation != generation
        ):
            self.said.add(generation)
            self.replies.append((protocol.Stale, generation))
        elif isinstance(message, protocol.Goodbye):
            self.end()
        elif isinstance(message, protocol.Free):
            session.caches.free(Peer(b""), message.cache)
        elif isinstance(message, protocol.Cancel):
            self._cancel(message)
        elif isinstance(message, Task | StepRequest):
            expected = session.expected(message, frames[1:])
            certain = not (isinstance(message, StepRequest) and message.cache in session.cancelled)
            asked = self.asked.setdefault((generation, message.request), [])
            asked.append([session, message, expected, certain])

    def _cancel(self, message):
        for asked in self.asked.get((message.generation, message.request), []):
            asked[3] = False
            if isinstance(asked[1], StepRequest):
                number = asked[1].cache
                self.session.cancelled.add(number)
                for session, header, *_ in [y for x in self.asked.values() for y in x]:
                    if session is self.session and getattr(header, "cache", None) == number:
                        self._make_uncertain(header)

    def _make_uncertain(self, header):
        for asked in self.asked[header.generation, header.request]:
            asked[3] = False

    def end(self):
        """Its session has ended."""
        if self.session is not None:
            self.session.ended, self.session = True, None

    def hear(self, wait):
        """Check all that has arrived, after waiting for so many milliseconds at most."""
        while self.socket.poll(wait):
            head = self.socket.recv()
            frames = [self._frame() for _ in range(protocol.frames_after(head))]
            self._check(head, decode(head), frames)
            wait = 0

    def _frame(self):
        if not self.socket.poll(int(1000 * LIMIT)):
            raise Violation(f"{self}: a reply does not end")
        return self.socket.recv()

    def _check(self, head, message, frames):
        for other in self.world.sessions:
            if other.secret in head and other not in self.sessions.values():
                raise Violation(f"{self} received the secret of another client's session")
        generation = getattr(message, "generation", None)
        if isinstance(message, protocol.Pong):
            self._check_own(generation, "a sign of life")
        elif isinstance(message, protocol.Result | REFUSED):
            self._check_own(generation, "a reply")
            self._check_answer(message, frames)
        else:
            self._check_reply(message)

    def _check_own(self, generation, what):
        if generation not in self.sessions:
            raise Violation(f"{self} received {what} of another client's session")

    def _check_answer(self, message, frames):
        waiting = self.asked.get((message.generation, message.request))
        if not waiting:
            raise Violation(
                f"{self} received a reply that its session has not asked for: {message}"
            )
        refused = isinstance(message, REFUSED)
        # A number that was used twice has two replies, in any order.
        matching = [x for x in waiting if (x[2] is None) == refused] or [
            x for x in waiting if refused and not x[3]
        ]
        if not matching:
            raise Violation(f"{self} received {message} for {waiting[0][1]}")
        asked = matching[0]
        waiting.remove(asked)
        if not waiting:
            del self.asked[message.generation, message.request]
        if refused:
            return
        sizes = form_of(asked[1]).result.sizes
        parts = [bytes(x) for x in Frames().read(None, frames, sizes, None)]
        if parts != asked[2]:
            raise Violation(f"{self} received a wrong result for {asked[1]}")

    def _check_reply(self, message):
        if not self.replies:
            raise Violation(f"{self} received {message} without a question")
        kind, value = self.replies.popleft()
        if kind is protocol.Stale and message != protocol.Stale(value):
            reason = "its request was without its secret and generation"
            raise Violation(f"{self} received {message} in place of Stale: {reason}")
        if not isinstance(message, kind):
            raise Violation(f"{self} received {message} in place of {kind} {value}")
        if isinstance(message, protocol.Welcome):
            if any(
                x.secret == message.secret or x.generation == message.generation
                for x in self.world.sessions
            ):
                raise Violation(f"{self} received a secret or generation that was given before")
            session = Session(message)
            session.owner = self
            self.sessions[message.generation] = session
            self.world.sessions.append(session)
            self.session = session

    def settle(self):
        """Wait until all immediate replies are there; what an ended session asked has none."""
        self.send([encode(protocol.StatusRequest())])
        end = time.monotonic() + LIMIT
        while self.replies:
            self.hear(100)
            if self.replies:
                self.world.hear_others()  # one of them may have the reply
            if time.monotonic() > end:
                raise Violation(f"{self} received no reply: {self.replies[0]}")
        for key, waiting in list(self.asked.items()):
            if waiting[0][0].ended:
                del self.asked[key]

    def drain(self):
        """Wait until all requests are answered."""
        end = time.monotonic() + LIMIT
        while self.asked:
            self.hear(100)
            if self.asked:
                self.world.hear_others()
            if time.monotonic() > end:
                raise Violation(f"{self} received no answer to {next(iter(self.asked.values()))}")

    def __str__(self):
        return f"key {self.key}, routing id {self.claimed.decode()}"


_TO_HELLO = protocol.Welcome | protocol.Refused
_TO_A_SERVER = (
    protocol.Ping | Task | StepRequest | protocol.Free | protocol.Cancel | protocol.Goodbye
    | protocol.Hello | protocol.StatusRequest | protocol.Knock
)  # fmt: skip


class World:
    """A server and its clients.

    Attributes:
        hostile: how many hostile messages were sent.
        sent: how many messages were sent in all.
    """

    def __init__(self, seed, number, folder, claims):
        self.random = np.random.default_rng((seed, number))
        self.claims = claims
        self.clients, self.sessions, self.kept = [], [], deque(maxlen=MOST_KEPT)
        self.left, self.dead = [], []  # sessions whose clients left silently, and their routing ids
        self.hostile = self.sent = self.names = 0
        self.secured, self.reads_apart = bool(number % 2), bool(number // 2 % 2)
        self.keys = [None] * KEYS
        self.options = {}
        if self.secured:
            first, *others = _folders_of_keys(folder)
            self.options["keys"] = server_keys(first)
            self.keys = [client_keys(x) for x in (first, *others)]
        self.address = f"ipc://{folder}/s"
        self.open = threading.Event()
        self.open.set()

    @contextlib.contextmanager
    def serving(self):
        """Serve, and compute only while `open` is set."""
        computes = worker.Worker._compute

        def gated(*arguments):
            self.open.wait(LIMIT)
            computes(*arguments)

        with contextlib.ExitStack() as stack:
            stack.enter_context(changed(worker.Worker, _compute=gated))
            stack.enter_context(changed(worker, _BRIEF=0.0))  # the gate stops no other thread
            if self.reads_apart:
                stack.enter_context(changed(server, _SMALL_PAYLOAD_BYTES=0))
            stack.enter_context(changed(AUDIT, disabled=True))
            deadlines = ServerDeadlines(idle=600.0, request=600.0)
            stack.enter_context(
                running(self.address, limits=SERVER_LIMITS, deadlines=deadlines, **self.options)
            )
            self.context = stack.enter_context(zmq.Context())
            self.observer = self._connect(0)
            stack.callback(self._close)
            stack.callback(self.open.set)
            self.clients += [self._connect(i % KEYS) for i in range(CLIENTS)]
            for client in self.clients:
                self.act(client, "hello")
            yield

    def _close(self):
        for each in (*self.clients, self.observer):
            each.socket.close(0)

    def _connect(self, key, claimed=None):
        self.names += claimed is None
        return Connection(self, key, claimed or b"client-%d" % self.names)

    def _choose(self, options):
        return options[int(self.random.integers(len(options)))]

    def round(self):
        """Let some clients send some messages each, and check all replies."""
        if self.random.random() < 0.15:
            self.open.clear() if self.open.is_set() else self.open.set()
        weights = np.array(list(KINDS.values())) / sum(KINDS.values())
        active = {int(x) for x in self.random.integers(CLIENTS, size=2)}
        for i in sorted(active):
            for _ in range(int(self.random.integers(1, 5))):
                self.act(self.clients[i], str(self.random.choice(list(KINDS), p=weights)), i)
        for i in sorted(active):
            self.clients[i].settle()
        if self.open.is_set():
            for client in self.clients:
                client.drain()
            self.hear_others()
            self._check_counts()

    def hear_others(self):
        """Check what has arrived at any client."""
        for client in self.clients:
            client.hear(0)

    def _check_counts(self):
        """Compare the server's leases and caches with the model's."""
        live = [client.session for client in self.clients if client.session is not None]
        least, most, found = self._counts(live), self._counts([*live, *self.left]), self.status()
        if not all(x <= y <= z for x, y, z in zip(least, found, most, strict=True)):
            raise Violation(
                f"leases, caches and their bytes: {found}, and not from {least} to {most}"
            )
        if found == least:
            self.left.clear()

    def status(self):
        self.observer.socket.send(encode(protocol.StatusRequest()))
        if not self.observer.socket.poll(int(1000 * LIMIT)):
            raise Violation("the server says nothing")
        message = decode(self.observer.socket.recv())
        if not isinstance(message, protocol.Status):
            raise Violation(f"someone without a lease received {message}")
        return message.clients, message.caches, message.cache_bytes

    def _counts(self, sessions):
        """The number of sessions and of their caches, and the bytes of these."""
        caches = [session.caches for session in sessions]
        return len(caches), sum(map(len, caches)), sum(each.nbytes for each in caches)

    def end(self):
        """Check that all ends with its sessions."""
        self.open.set()
        for client in self.clients:
            client.settle()
            client.drain()
        end = time.monotonic() + LIMIT
        while self.left:
            self._check_counts()
            if time.monotonic() > end:
                raise Violation("a lease does not end though its client has left")
            time.sleep(0.01)
        for client in self.clients:
            if client.session is not None:
                self._send(client, protocol.Goodbye(client.session.generation))
            client.settle()
        self._check_counts()

    def act(self, client, kind, i=0):
        """Let a client send a message of a kind, or leave."""
        busy = sum(map(len, client.asked.values())) >= MOST_ASKED
        if kind in HOSTILE:
            frames = self._hostile(client, kind)
            if self._is_decided(client, frames):
                self.hostile += 1
                self.sent += 1
                client.send(frames)
        elif kind == "leave":
            self._leave(i)
        elif client.session is None or kind == "hello":
            fields = {"library": library_version(), "client": "test"}
            self._send(client, protocol.Hello(**fields, transports=["zmq"], dtypes=[]))
        elif not (busy and kind in ("task", "step")):
            message, parts = self._message(client.session, kind)
            self._send(client, message, *parts)

    def _send(self, client, message, *parts):
        secret = bytes(16) if client.session is None else client.session.secret
        frames = [encode(message, secret), *parts]
        if self._is_decided(client, frames):
            self.kept.append((client.session, frames))
            self.sent += 1
            client.send(frames)

    def _is_decided(self, client, frames):
        """Whether the order of a message and of requests in flight does not matter."""
        try:
            message = decode(frames[0])
        except ProtocolError:
            return True
        session = client.session
        if session is None and isinstance(message, protocol.Ping):
            # A client may give signs of life of its session on a second connection of its key.
            secret = session_of(frames[0])
            owners = [x.owner.key for x in self.sessions if x.secret == secret]
            return not (owners and (not self.secured or client.key in owners))
        if session is not None and getattr(message, "request", 0) > 2**40:
            return message.generation != session.generation  # else it has no later numbers
        apart = isinstance(message, protocol.Free) or (
            isinstance(message, protocol.Cancel) and self.reads_apart
        )
        return not (apart and client.asked)

    def _message(self, session, kind):
        """A message that is right in this session, and its payload."""
        generation, number = session.generation, session.next_number()
        cache = int(self.random.integers(CACHES))
        if kind == "task":
            packed = packed_request(int(self.random.integers(len(REQUESTS))))
            return packed.numbered(generation, number), [x.tobytes() for x in packed.parts]
        if kind == "step":
            held = session.cache(cache)
            writes, start = (0, 0) if held is None else (held.writes, held.length)
            start = max(0, start - int(self.random.integers(3))) if start < 200 else 0
            queries, rows = self.random.integers(1, 5, 2).tolist()
            seed = int(self.random.integers(2**30))
            packed = step(seed, writes, start, queries, max(queries, rows), cache)
            return packed.numbered(generation, number), [x.tobytes() for x in packed.parts]
        if kind == "ping":
            return protocol.Ping(generation), []
        if kind == "free":
            return protocol.Free(generation, cache), []
        if kind == "cancel":
            numbers = [x for g, x in session.owner.asked if g == generation] or [1]
            return protocol.Cancel(generation, self._choose(numbers)), []
        return protocol.Goodbye(generation), []

    def _hostile(self, client, kind):
        """The frames of a message that nobody honest sends."""
        if kind == "replayed" and self.kept:
            own = [frames for session, frames in self.kept if session is client.session]
            every = [frames for _, frames in self.kept]
            return self._choose(own if own and self.random.integers(2) else every)
        if kind == "of no kind":
            other = self._choose([protocol.Pong(1, 0, 0), protocol.Result(1, 1, 0, 0.0)])
            return [encode(other, self._secret())]
        if kind == "stolen":
            return self._stolen(client)
        session = client.session or self._choose(self.sessions)
        number = session.next_number()
        packed = packed_request(int(self.random.integers(len(REQUESTS))))
        if self.random.integers(2):
            held = session.cache(0)
            state = (0, 0) if held is None else (held.writes, held.length)
            packed = step(int(self.random.integers(2**30)), *state, 1, 2, 0)
        header = packed.numbered(session.generation, number)
        frames = damage(self.random, header, packed.parts, "/nonexistent/canary", session.secret)
        return [x.tobytes() for x in frames] or [b""]

    def _secret(self):
        return self._choose([*[x.secret for x in self.sessions[-8:]], bytes(16), b"x" * 16])

    def _stolen(self, client):
        """A right message of another session, some of it with this client's own numbers."""
        live = [x.session for x in self.clients if x.session not in (None, client.session)]
        ended = [x for x in self.sessions if x.ended][-8:] + self.left
        if not (live or ended):
            return [b""]
        from_live = live and (self.random.integers(4) or not ended)
        theirs = self._choose(live if from_live else ended)
        kinds = ["task", "step", "step", "ping", "free", "cancel", "goodbye"]
        message, parts = self._message(theirs, str(self.random.choice(kinds)))
        own = client.session
        secret = theirs.secret
        if own is not None and (which := int(self.random.integers(3))):
            if which == 1:
                secret = own.secret
            else:
                message = msgspec.structs.replace(message, generation=own.generation)
        return [encode(message, secret), *parts]

    def _leave(self, i):
        """Let a client leave, and a client with any key come back under any routing id."""
        client = self.clients[i]
        client.settle()
        if client.session is not None and self.random.integers(4):
            self.left.append(client.session)
        elif client.session is not None:
            self._send(client, protocol.Goodbye(client.session.generation))
            client.settle()
        client.end()
        client.socket.close(0)
        living = [x.claimed for x in self.clients if x is not client]
        self.dead = [x for x in [*self.dead, client.claimed] if x not in living][-4:]
        names = {"new": [None], "dead": self.dead or [None], "living": living}
        key = int(self.random.integers(KEYS))
        self.clients[i] = self._connect(key, self._choose(names[self._choose(self.claims)]))


# With as many credits, no client's connection ends because it sends payloads without credit.
SERVER_LIMITS = Limits(tokens=4096, bytes=2**24, cache_bytes=2**30, requests=2**16, clients=1024)


def _folders_of_keys(folder):
    """Make folders of keys of several clients that one server trusts; return them."""
    folders = [Path(folder) / f"keys-{i}" for i in range(KEYS)]
    for each in folders:
        generate(each)
    first = folders[0]
    for i, other in enumerate(folders[1:]):
        (other / "server.public").write_bytes((first / "server.public").read_bytes())
        public = (other / "client.public").read_bytes()
        (first / "trusted" / f"{i}.public").write_bytes(public)
    return folders


def fuzz_sequence(
    seed, number, hostile=HOSTILE_PER_SEQUENCE, claims=("new", "dead", "dead", "living")
):
    """Send sequence `number`, with so many hostile messages; return the number of all messages.

    Odd sequences have keys. `claims` are the routing ids that clients claim: new ones, and those of
    clients that have left or still live.
    """
    with tempfile.TemporaryDirectory() as folder:
        world = World(seed, number, folder, claims)
        with world.serving():
            while world.hostile < hostile:
                world.round()
            world.end()
        return world.sent


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000, help="hostile ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.only is not None:
        print(fuzz_sequence(arguments.seed, arguments.only), "messages")
        return 0
    sequences, sent, start = -(-arguments.messages // HOSTILE_PER_SEQUENCE), 0, time.monotonic()
    for number in range(sequences):
        try:
            sent += fuzz_sequence(arguments.seed, number)
        except BaseException:
            print(f"sequence {number} has failed: repeat it with --only {number}")
            raise
        if number % max(1, sequences // 20) == 0 or number + 1 == sequences:
            hostile, seconds = (number + 1) * HOSTILE_PER_SEQUENCE, time.monotonic() - start
            print(f"{hostile} hostile messages of {sent}, {seconds:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

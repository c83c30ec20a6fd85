"""Damage requests to an attention server at random, and check how it answers each of them.

Run it as `python -m tests.tools.fuzz_protocol`.

The calls are valid calls of gRPC, but their messages are damaged: tasks, steps of a cache, and
requests of other methods. The server runs in a separate process. It may refuse a damaged request,
with a reason that shows nothing of the payload. Otherwise the payload must have arrived as it was
sent, and the result must be right for what the header says. A step that is refused must leave its
cache as it was, so that later steps have right results. The memory and the descriptors of the
server must not grow. Message i of a seed is always the same, so `--only i` repeats it alone.
"""

import argparse
import functools
import pickle
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import grpc
import numpy as np
import torch

from seqpar.servers.server.account import Client as Owner
from seqpar.servers.server.caches import Caches
from seqpar.servers.server.compute import compute
from seqpar.servers.wire import payload
from seqpar.servers.wire.codec import KeptSlices, pack, pack_step, unpack
from seqpar.servers.wire.header import form_of
from seqpar.servers.wire.limits import Limits
from seqpar.servers.wire.messages import Step, Task
from seqpar.servers.wire.pages import Seen
from seqpar.servers.wire.payload import Incoming, RequestError, bytes_of, chunks
from seqpar.servers.wire.versions import VERSIONS, data_of, digest, joined
from seqpar.softmax.compute.call_options import CallOptions
from tests.support.changed import changed
from tests.support.requests import random_request
from tests.support.servers import Client, ServerProcess, usage

LIMITS = Limits(tokens=4096, bytes=2**24, cache_bytes=2**20)
OWNER = Owner(b"")
CPU, ROWS, CACHE = torch.device("cpu"), 20, 7  # the rows of the cache, and its number
HUGE = [0, 1, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**64 - 1]
FIELDS = [*Task.__dataclass_fields__, *Step._fields, "session", "checksum", "places"]
CHUNK = 512  # bytes of a payload per message, so that small payloads have several messages
PER_SESSION = 500  # requests of a session
VERSION = VERSIONS[0]
MAX_REASON, SHOWN = 200, 8  # the most characters of a reason; the most bytes of a payload in it
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,  # malformed or above a cap
    grpc.StatusCode.NOT_FOUND,  # the step is for a different cache
    grpc.StatusCode.FAILED_PRECONDITION,  # the request is of another session
}


class Canary:
    """Writes a file when it is unpickled, which the server must never do."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@functools.cache
def _pickled(path):
    return pickle.dumps(Canary(path))


def step(seed, writes, start, queries, rows, cache=CACHE):
    """Return a step of a cache that has had `writes` writes."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (1, queries, 4, 4), (1, rows, 2, 4), (1, rows, 2, 4)
    operands = [torch.randn(shape, generator=generator) for shape in shapes]
    seen = Seen(start + rows - queries, 2**40, 0)
    return pack_step(cache, writes, start, operands, seen, CallOptions(0.5, 0.0, "default", True))


def caches(owner=OWNER):
    """Return a server's caches; one of them has `ROWS` rows."""
    found = Caches(LIMITS.cache_bytes, CPU, "default")
    first = step(0, 0, 0, 1, ROWS)
    found.admit(owner, first.task, first.step, [x.tobytes() for x in first.parts])
    return found


def messages_of(packed, session):
    """Return the encoded messages of a request, with small chunks."""
    with changed(payload, CHUNK_BYTES=CHUNK):
        first, *others = chunks(packed.parts) if any(x.size for x in packed.parts) else [()]
    header = packed.header(session)
    return [VERSION.request(header, first), *(joined(b"", x) for x in others)]


def choose(random, options):
    return options[int(random.integers(len(options)))]


def damage(random, messages, canary="/nonexistent/canary"):
    """Damage one message, a field of the header, or the list of messages; return all messages."""
    kind = random.integers(9)
    messages = list(messages)
    i = int(random.integers(len(messages)))
    one = messages[i]
    if kind == 0:  # a bit
        data = bytearray(one)
        data[random.integers(len(data))] ^= 1 << int(random.integers(8))
        messages[i] = bytes(data)
    elif kind == 1:  # cut short, or longer
        cut = one[: random.integers(len(one) + 1)]
        messages[i] = one + cut if random.integers(2) else cut
    elif kind == 2:  # random bytes
        messages[i] = random.bytes(int(random.integers(0, 4000)))
    elif kind == 3:
        del messages[i:]
    elif kind == 4:
        messages.insert(i, messages[random.integers(len(messages))])
    elif kind == 5:
        random.shuffle(messages)
    elif kind == 6:
        messages[i] = _pickled(canary)
    else:
        messages[0] = with_a_field(random, messages[0])
    return messages


def with_a_field(random, raw):
    """Return a first message with one wrong field; most such messages have a right checksum."""
    message = VERSION.messages.ComputeRequest.FromString(raw)
    of_payload = message.checksum ^ digest(message)
    name = choose(random, FIELDS)
    value = choose(random, [*HUGE, int(random.integers(0, 99))])
    if name == "session":
        message.session = random.bytes(int(random.integers(0, 32)))
    elif name == "checksum":
        message.checksum = value
    elif name == "places":
        message.places.request = value
    elif name in Step._fields:
        value = value % 2**63 - 2**62 if name == "offset" else value
        setattr(message.step, name, value)
    elif name in ("scale", "softcap"):
        setattr(message.task, name, choose(random, [value, np.nan, np.inf, -1.0, 1e300]))
    elif name in ("operation", "dtype"):
        setattr(message.task, name, value % 2**31)
    else:
        found = message.task.DESCRIPTOR.fields_by_name[name]
        setattr(message.task, name, bool(value % 2) if found.type == found.TYPE_BOOL else value)
    if name != "checksum" and random.integers(4):
        message.checksum = of_payload ^ digest(message)
    return message.SerializeToString()


def read(messages, session, limits=LIMITS):
    """Read a request as a server should; return its header, the parts of its payload, and the
    rest."""
    if not messages:
        raise RequestError("request: there is none")
    header, data = VERSION.read_request(messages[0])
    if header.session != session or header.places is not None:
        raise RequestError("session, places: wrong")
    form = form_of(header.task)
    form.check(limits)
    incoming, rest = Incoming(form.request), iter(messages[1:])
    incoming.take(data)
    while incoming.missing:
        if (raw := next(rest, None)) is None:
            raise RequestError("payload: it ends too early")
        incoming.take(data_of(raw))
    form.request.check(incoming.parts, header.checksum)
    return header, incoming.parts, list(rest)


def replies_of(call):
    """Return the data of all replies of a call, and the error that ends the call, or None."""
    data = []
    try:
        for reply in call:
            data.append(VERSION.read_reply(reply)[1])
    except grpc.RpcError as error:
        return b"".join(data), error
    return b"".join(data), None


def result_of(header, parts, held, owner=OWNER):
    """Compute a request that was read. `held` are the caches of its session."""
    if header.step is not None:
        return held.admit(owner, header.task, header.step, parts).compute()
    request = unpack(header.task, header.checksum, parts, "default", KeptSlices())
    return compute([request], CPU)[0]


class Fuzzer:
    """A client of a server, with a model of its session."""

    def __init__(self, address, seed, canary):
        self._address, self._seed, self._canary = address, seed, canary
        self._client = self._held = None
        self.counts = {"refused": 0, "right": 0}

    def renew(self):
        """Begin a session without caches."""
        self.close()
        self._client = Client(self._address)
        self._held = Caches(LIMITS.cache_bytes, CPU, "default")

    def close(self):
        if self._client is not None:
            self._client.close()

    def attempt(self, i):
        """Send request i; raise an AssertionError if the answer is wrong."""
        random = np.random.default_rng((self._seed, i))
        if random.integers(20) == 0:
            self._attempt_other(random)
            return
        packed = self._sane(random)
        messages = messages_of(packed, self._client.session)
        if random.integers(10):
            messages = damage(random, messages, self._canary)
        expected, left = [], messages
        sent = b"".join(x.tobytes() for x in packed.parts)
        with suppress(RequestError):
            while left or not expected:
                header, parts, left = read(left, self._client.session)
                expected += bytes_of(result_of(header, parts, self._held))
                assert b"".join(map(bytes, parts)) == sent, "a wrong payload was taken"
            left = None
        self._check(self._client.compute(messages), expected, left is None, packed)

    def _sane(self, random):
        """Return a valid request: a task, or a step of the session's cache."""
        seed, sizes = int(random.integers(1000)), random.integers(1, 40, 2).tolist()
        if random.integers(2):
            return _task(seed % 50, *sizes)
        cache = self._held._caches.get(OWNER, {}).get(CACHE)
        if cache is None or cache.length > 200:
            if cache is not None:
                self._client.free(CACHE)
                self._held.free(OWNER, CACHE)
            return step(seed, 0, 0, *sizes)
        start = max(0, cache.length - int(random.integers(5)))
        return step(seed, cache.writes, start, *sizes)

    def _check(self, call, expected, is_right, packed):
        """Check that a call returns the expected results, or that it is refused if not
        `is_right`."""
        data, error = replies_of(call)
        if error is None:
            assert is_right, "a damaged request was not refused"
        else:
            code, details = error.code(), error.details()
            assert not is_right, f"a right request was refused: {code}, {details}"
            self._check_refusal(code, details, packed)
        assert data == b"".join(x.tobytes() for x in expected), "a result was wrong"
        self.counts["right" if is_right else "refused"] += 1

    def _check_refusal(self, code, details, packed):
        assert code in REFUSALS, f"{code}, {details}"
        assert details.isprintable() and len(details) <= MAX_REASON, details
        for part in packed.parts:
            data = part[: SHOWN * (part.size // SHOWN)].tobytes()
            shown = {data[i : i + SHOWN] for i in range(0, len(data), SHOWN)} - {bytes(SHOWN)}
            assert not any(x in details.encode() for x in shown), "a reason shows data"

    def _attempt_other(self, random):
        """Send a request to a different method, or to a method that does not exist."""
        name = choose(random, ["Session", "Free", "Status", "Compute2", ""])
        method = f"/{self._client.version.service}/{name}"
        raw = random.bytes(int(random.integers(0, 200)))
        if name == "Free" and random.integers(2):
            number = choose(random, [CACHE, *HUGE])
            raw = self._client.message("FreeRequest", session=random.bytes(16), cache=number)
        call = self._client.channel.unary_stream(method)(raw, timeout=60)
        try:
            next(call)
            call.cancel()
            outcome = "right"
        except grpc.RpcError as error:
            outcome, code, details = "refused", error.code(), error.details()
            assert code in (*REFUSALS, grpc.StatusCode.UNIMPLEMENTED), f"{code}, {details}"
        self.counts[outcome] += 1


@functools.lru_cache(4096)
def _task(seed, queries, keys):
    return pack(random_request(seed, queries, keys, dim=4))


def fuzz(seed, numbers, address, canary, say=lambda done: None):
    """Send these damaged requests to a server; return how often each outcome occurred."""
    fuzzer = Fuzzer(address, seed, str(canary))
    try:
        for count, i in enumerate(numbers):
            if count % PER_SESSION == 0:
                fuzzer.renew()
                say(count)
            try:
                fuzzer.attempt(i)
            except BaseException:
                first = i - count % PER_SESSION
                print(f"request {i} has failed: repeat it with --first {first} --only {i}")
                raise
    finally:
        fuzzer.close()
    assert not canary.exists(), "a pickle was executed"
    return fuzzer.counts


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="end with this request")
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    last = arguments.messages - 1 if arguments.only is None else arguments.only
    usages = []

    def say(done):
        if done % 10_000 == 0:
            usages.append(usage(server.process.pid))
            print(f"{done} requests, {usages[-1][2] / 2**20:.0f} MiB", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(f"ipc://{folder}/s", limits=LIMITS)
        numbers = range(arguments.first, last + 1)
        try:
            counts = fuzz(arguments.seed, numbers, server.address, Path(folder) / "canary", say)
            say(0)
        finally:
            server.end()
    files, _, nbytes = np.subtract(usages[-1], usages[min(1, len(usages) - 1)])
    print(f"{counts}; descriptors and memory grew by {files} and {nbytes / 2**20:.1f} MiB")
    return int(files > 8 or nbytes > 2**24)


if __name__ == "__main__":
    sys.exit(main())

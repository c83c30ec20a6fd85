"""Damage what attention servers send to clients: a client must get a right result or an error.

Run it as `python -m tests.tools.fuzz_replies`.

A relay stands between a server and three pools. It forwards what clients send, and changes the
messages of replies and of sessions inside valid calls:

- it flips bits, and cuts, drops, repeats and reorders messages;
- it sends an earlier message of any client again;
- it puts the payload of one result behind the header of another result;
- it delays messages, and ends calls too early, with any status.

It never forges a whole result, since only TLS protects from that. Two pools submit tasks; the third
pool decodes with caches. Every result is compared bit for bit, and must arrive within its deadline.
"""

import argparse
import asyncio
import contextlib
import pickle
import sys
import tempfile
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import torch

from seqpar import ServersError
from seqpar.servers.pool import connection, dispatcher
from seqpar.servers.server import service
from seqpar.servers.transport.addresses import bind_target, path_of
from seqpar.servers.transport.event_loop import start
from seqpar.servers.wire.limits import MAX_CALL_SECONDS
from seqpar.servers.wire.payload import RequestError
from seqpar.servers.wire.versions import VERSIONS
from tests.support.changed import changed
from tests.support.requests import random_request
from tests.support.server_caches import decode, drawn, prefilled, same_bits, undisturbed
from tests.support.servers import connect, expected, running, same
from tests.tools.fuzz_protocol import Canary

LIMIT = 60.0  # seconds for a result
DEADLINES = {"connect": 0.3, "request": 0.5, "hedge": 20.0, "give_up": 40.0}
SHARE, SHARE_OF_EVENTS = 0.3, 0.1  # fractions of replies and of events of sessions that are changed
DEPTH = 4  # tasks in flight per pool
CHUNK = 64  # bytes of a result per message, so that each result has several
MOST_KEPT = 64
HELD = 0.005  # seconds by which a message is delayed
RETRIES = dict.fromkeys(["_RETRY_SECONDS", "_MAX_RETRY_SECONDS", "_MAX_UNIX_RETRY_SECONDS"], 0.01)
REQUESTS = [random_request(seed, 8, 16, dim=4) for seed in range(8)]  # all of the same shapes
STATUSES = [x for x in grpc.StatusCode if x != grpc.StatusCode.OK]


class Ended(Exception):
    """The relay ends a call."""


class Relay(grpc.GenericRpcHandler):
    """Stands between a server and its clients.

    Attributes:
        changed: how many messages were changed.
    """

    def __init__(self, random):
        self.changed, self._random = 0, random
        self._kept = {}  # method: earlier messages

    async def begin(self, address, server):
        self._channel = grpc.aio.insecure_channel(bind_target(server))
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self,))
        self._server.add_insecure_port(bind_target(address))
        Path(path_of(address)).chmod(0o600)
        await self._server.start()

    async def end(self):
        await self._server.stop(None)
        await self._channel.close()

    def service(self, details):
        method = details.method.rpartition("/")[2]
        handle = partial(self._handle, details.method, Replies(self, method))
        return grpc.stream_stream_rpc_method_handler(handle)

    def kept(self, method):
        return self._kept.setdefault(method, deque(maxlen=MOST_KEPT))

    async def _handle(self, path, replies, requests, context):
        call = self._channel.stream_stream(path)(timeout=MAX_CALL_SECONDS)
        sending = asyncio.ensure_future(self._send(call, context))
        try:
            while (raw := await call.read()) is not grpc.aio.EOF:
                for message in await replies.change(raw, self._random):
                    await context.write(message)
            for message in replies.held:
                await context.write(message)
            code, details = await call.code(), await call.details()
        except Ended as error:
            (code,), details = error.args, "ended"
        finally:
            sending.cancel()
            call.cancel()
        if code != grpc.StatusCode.OK:
            await context.abort(code, details)

    async def _send(self, call, context):
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while (raw := await context.read()) is not grpc.aio.EOF:
                await call.write(raw)
            await call.done_writing()


class Replies:
    """The messages of one call to a client, changed or not."""

    def __init__(self, relay, method):
        self._relay, self._method = relay, method
        self._share = SHARE_OF_EVENTS if method == "Session" else SHARE
        self.held = []  # messages that are sent after later messages

    async def change(self, raw, random):
        """Return the messages that are sent in place of a message."""
        kept, earlier, self.held = self._relay.kept(self._method), self.held, []
        messages = [raw]
        if random.random() < self._share:
            self._relay.changed += 1
            messages = await self._changed(raw, random, kept)
        kept.append(raw)
        return messages + earlier

    async def _changed(self, raw, random, kept):
        kind = int(random.integers(11))
        if kind == 0 and raw:
            data = bytearray(raw)
            data[random.integers(len(data))] ^= 1 << int(random.integers(8))
            return [bytes(data)]
        if kind == 1:
            cut = raw[: int(random.integers(len(raw) + 1))]
            return [cut if random.integers(2) else raw + cut]
        if kind == 2:
            return [random.bytes(int(random.integers(1, 4000)))]
        if kind == 3:
            return []
        if kind == 4:
            return [raw, raw]
        if kind == 5:
            self.held.append(raw)
            return []
        if kind == 6:
            return [pickle.dumps(Canary("/nonexistent/canary"))]
        if kind == 7:
            raise Ended(STATUSES[int(random.integers(len(STATUSES)))])
        if kind == 8:
            raise Ended(grpc.StatusCode.OK)
        if kept:
            other = kept[int(random.integers(len(kept)))]
            if kind == 9:
                return [[other], [other, raw], [raw, other]][int(random.integers(3))]
            return [self._mixed(raw, other)]
        await asyncio.sleep(HELD)
        return [raw]

    def _mixed(self, raw, other):
        """Return the header of one result with the payload of another result."""
        with contextlib.suppress(RequestError):
            if self._method == "Compute":
                (header, _), (_, data) = map(VERSIONS[0].read_reply, (raw, other))
                return VERSIONS[0].reply(header, [data])
        return other


def _small_chunks(parts):
    data = b"".join(x.tobytes() for x in parts)
    return ([data[i : i + CHUNK]] for i in range(0, len(data), CHUNK))


class _Decoder(threading.Thread):
    """Decodes with caches until it is told to end.

    Attributes:
        ended: an event that tells it to end.
        right: how many programs of steps had right results.
        wrong: how many programs of steps had a wrong result.
        fault: the error that it raised, or None.
    """

    def __init__(self, address, folder):
        super().__init__(daemon=True)
        self.ended, self.fault = threading.Event(), None
        self.right = self.wrong = 0
        self._tensors = drawn()
        self._expected = undisturbed(folder, self._tensors)
        self._pool = connect(address, deadlines=DEADLINES)

    def run(self):
        try:
            while not self.ended.is_set():
                with prefilled(self._pool, self._tensors) as cache:
                    is_right = same_bits(decode(cache, self._tensors), self._expected)
                self.right += is_right
                self.wrong += not is_right
        except Exception as error:
            self.fault = error
        finally:
            self._pool.close()


def fuzz_replies(seed, replies, right=0, say=lambda done: None):
    """Change `replies` replies, and continue until `right` results were right.

    Return the number of right results and the number of errors. Raise an AssertionError if a result
    is wrong or late.
    """
    counts = {"right": 0, "errors": 0}
    random, relay = np.random.default_rng((seed, 1)), Relay(np.random.default_rng((seed, 2)))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(changed(connection, **RETRIES))
        stack.enter_context(changed(dispatcher, _BEAT_SECONDS=0.002))
        stack.enter_context(changed(service, chunks=_small_chunks))
        server = stack.enter_context(running(f"ipc://{folder}/s"))
        address = f"ipc://{folder}/relay"
        start(relay.begin(address, server.address)).result(LIMIT)
        stack.callback(lambda: start(relay.end()).result(LIMIT))
        for request in REQUESTS:
            expected(request)
        pools = [connect(address, home=False, deadlines=DEADLINES) for _ in range(2)]
        for pool in pools:
            stack.callback(pool.close)
        decoder = _Decoder(address, folder)
        decoder.start()
        stack.callback(decoder.join)
        stack.callback(decoder.ended.set)
        flying = [deque() for _ in pools]
        while (more := relay.changed < replies or counts["right"] < right) or any(flying):
            for pool, futures in zip(pools, flying, strict=True):
                while more and len(futures) < DEPTH:
                    request = REQUESTS[int(random.integers(len(REQUESTS)))]
                    futures.append((time.monotonic(), request, pool.submit(request)))
                _collect(futures, counts)
            time.sleep(0.001)
            say(relay.changed)
    assert decoder.fault is None, f"a step has failed: {decoder.fault!r}"
    assert not decoder.wrong, "a step's result was wrong"
    return counts | {"steps": decoder.right}


def _collect(futures, counts):
    """Check the results that have arrived."""
    while futures and futures[0][2].done():
        _, request, future = futures.popleft()
        try:
            assert same(future.result(), request), "a result was wrong"
        except ServersError:
            counts["errors"] += 1
        else:
            counts["right"] += 1
    assert not futures or time.monotonic() - futures[0][0] < LIMIT, "a task has no result"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replies", type=int, default=20_000, help="that are changed")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start, told = time.monotonic(), [0]

    def say(done):
        if done - told[0] >= max(1, arguments.replies // 20):
            told[0] = done
            print(f"{done} replies changed, {time.monotonic() - start:.0f} s", flush=True)

    print(fuzz_replies(arguments.seed, arguments.replies, say=say))
    return 0


if __name__ == "__main__":
    sys.exit(main())

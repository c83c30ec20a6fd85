"""Damage what attention servers send to clients: each result is right, or there is an error.

Run it as `python -m tests.tools.fuzz_replies`.

A relay stands between a server and three pools. It passes on what clients send, and changes
replies: it flips bits, cuts, drops, repeats and reorders frames, sends messages again, sends one
client's messages to another, and puts the payload of one result behind the header of another. It
forges no checksums: only keys protect from that. Two pools have tasks computed; the third decodes
with caches. Every result is compared, bit for bit, and must arrive within its deadline.
"""

import argparse
import contextlib
import pickle
import sys
import tempfile
import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import zmq

from seqpar import ServersError
from seqpar.servers.pool import connection, dispatcher
from seqpar.servers.wire import protocol
from tests.support.changed import changed
from tests.support.requests import random_request
from tests.support.server_caches import decode, drawn, prefilled, same_bits, undisturbed
from tests.support.servers import connect, expected, running, same
from tests.tools.fuzz_protocol import Canary

LIMIT = 60.0  # seconds for a result
DEADLINES = {"connect": 0.3, "request": 0.5, "hedge": 20.0, "give_up": 40.0}
SHARE = 0.3  # of replies that are changed
DEPTH = 4  # tasks that a pool has in flight
MOST_ROUTES, MOST_KEPT = 16, 64
HELD = 0.005  # seconds that a reply is held back for at most
REQUESTS = [random_request(seed, 8, 16, dim=4) for seed in range(8)]  # of the same shapes


class Relay:
    """Stands between a server and its clients.

    Attributes:
        address: for clients.
        changed: how many replies were changed.
    """

    def __init__(self, context, server, random):
        self._context, self._server, self._random = context, server, random
        self._front = context.socket(zmq.ROUTER)
        self._front.linger = 0
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self.address, self.changed = f"tcp://127.0.0.1:{port}", 0
        self._backs = OrderedDict()  # the sockets to the server, by the client's route
        self._kept = deque(maxlen=MOST_KEPT)  # (route, frames) of earlier replies
        self._held = []  # (when, route, frames) of replies that are sent after later ones
        self._poller = zmq.Poller()
        self._poller.register(self._front, zmq.POLLIN)

    def turn(self):
        """Pass on what has arrived."""
        ready = dict(self._poller.poll(5))
        if self._front in ready:
            with contextlib.suppress(zmq.Again):
                while True:
                    route, *frames = self._front.recv_multipart(zmq.DONTWAIT)
                    self._back(route).send_multipart(frames)
        for route, back in list(self._backs.items()):
            if back in ready:
                with contextlib.suppress(zmq.Again):
                    while True:
                        head = back.recv(zmq.DONTWAIT)
                        count = protocol.frames_after(head)
                        self._reply(route, [head, *[back.recv() for _ in range(count)]])
        now = time.monotonic()
        while self._held and self._held[0][0] < now:
            self._send(*self._held.pop(0)[1:])

    def _back(self, route):
        if route not in self._backs:
            self._backs[route] = back = self._context.socket(zmq.DEALER)
            back.linger = 0
            back.connect(self._server)
            self._poller.register(back, zmq.POLLIN)
            if len(self._backs) > MOST_ROUTES:
                self._close(self._backs.popitem(last=False)[1])
        self._backs.move_to_end(route)
        return self._backs[route]

    def _reply(self, route, frames):
        """Send a reply to a client, changed or not."""
        earlier, self._held = self._held, []
        if self._random.random() < SHARE:
            self.changed += 1
            self._change(route, frames)
        else:
            self._send(route, frames)
        self._kept.append((route, frames))
        for _, to, held in earlier:
            self._send(to, held)

    def _send(self, route, frames):
        for frame in frames:
            self._front.send_multipart([route, frame])

    def _change(self, route, frames):
        random, kind = self._random, int(self._random.integers(12))
        i = int(random.integers(len(frames)))
        changed = list(frames)
        if kind == 0 and frames[i]:
            data = bytearray(frames[i])
            data[random.integers(len(data))] ^= 1 << int(random.integers(8))
            changed[i] = bytes(data)
        elif kind == 1:
            cut = frames[i][: int(random.integers(len(frames[i]) + 1))]
            changed[i] = cut if random.integers(2) else frames[i] + cut
        elif kind == 2:
            changed[i] = random.bytes(int(random.integers(1, 4000)))
        elif kind == 3:
            del changed[i]
        elif kind == 4:
            changed.insert(i, frames[int(random.integers(len(frames)))])
        elif kind == 5:
            random.shuffle(changed)
        elif kind == 6:
            changed[i] = pickle.dumps(Canary("/nonexistent/canary"))
        elif kind == 7:
            changed += frames
        elif kind == 8:
            self._held.append((time.monotonic() + HELD, route, frames))
            return
        elif self._kept:
            to, other = self._kept[int(random.integers(len(self._kept)))]
            if kind == 9:  # an earlier reply, to any client
                changed = [*other, *frames] if random.integers(2) else [*frames, *other]
            elif kind == 10:  # this reply to another client, and that client's to this one
                self._send(to, frames)
                changed = [*other, *frames]
            else:  # this header with another payload
                changed = [frames[0], *other[1:]]
        self._send(route, changed)

    def _close(self, back):
        self._poller.unregister(back)
        back.close(0)

    def close(self):
        """End all connections."""
        for back in self._backs.values():
            self._close(back)
        self._front.close(0)


class _Decoder(threading.Thread):
    """Decodes with caches until it is told to end.

    Attributes:
        ended: tells it.
        wrong: how many programs of steps had a wrong result.
        fault: what it has raised, or None.
    """

    def __init__(self, address, folder):
        super().__init__(daemon=True)
        self.ended, self.wrong, self.fault = threading.Event(), 0, None
        self._tensors = drawn()
        self._expected = undisturbed(folder, self._tensors)
        self._pool = connect(address, deadlines=DEADLINES)

    def run(self):
        try:
            while not self.ended.is_set():
                with prefilled(self._pool, self._tensors) as cache:
                    self.wrong += not same_bits(decode(cache, self._tensors), self._expected)
        except Exception as error:
            self.fault = error
        finally:
            self._pool.close()


def fuzz_replies(seed, replies, right=0, say=lambda done: None):
    """Change so many replies, and more until so many results are right.

    Return how many results were right, and how many errors there were. Raise an AssertionError if a
    result is wrong or late.
    """
    counts = {"right": 0, "errors": 0}
    random = np.random.default_rng((seed, 1))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(changed(connection, _RETRY_SECONDS=0.002, _MAX_RETRY_SECONDS=0.01))
        stack.enter_context(changed(dispatcher, _BEAT_SECONDS=0.002))
        server = stack.enter_context(running(f"ipc://{folder}/s"))
        context = stack.enter_context(zmq.Context())
        relay = Relay(context, server.address, random)
        stack.callback(relay.close)
        for request in REQUESTS:
            expected(request)
        threads = stack.enter_context(ThreadPoolExecutor(3))
        starting = [
            threads.submit(connect, relay.address, home=False, deadlines=DEADLINES),
            threads.submit(connect, relay.address, home=False, deadlines=DEADLINES),
            threads.submit(_Decoder, relay.address, folder),
        ]
        while not all(x.done() for x in starting):
            relay.turn()
        *pools, decoder = (x.result() for x in starting)
        decoder.start()
        stack.callback(decoder.join)
        stack.callback(decoder.ended.set)
        for pool in pools:
            stack.callback(pool.close)
        flying = [deque() for _ in pools]

        def top_up(more):
            for pool, futures in zip(pools, flying, strict=True):
                while more and len(futures) < DEPTH:
                    request = REQUESTS[int(random.integers(len(REQUESTS)))]
                    futures.append((time.monotonic(), request, pool.submit(request)))

        while (more := relay.changed < replies or counts["right"] < right) or (
            decoder.is_alive() or any(flying)
        ):
            top_up(more)
            if not more:
                decoder.ended.set()
            relay.turn()
            for futures in flying:
                _collect(futures, counts)
            say(relay.changed)
    assert decoder.fault is None, f"a step has failed: {decoder.fault!r}"
    assert not decoder.wrong, "a step's result was wrong"
    return counts


def _collect(futures, counts):
    """Check the results that are there."""
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

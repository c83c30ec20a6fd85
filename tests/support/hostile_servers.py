"""Servers that break the rules of the service; each runs in a new process."""

import contextlib
import functools
import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import grpc
from grpc import _common

from seqpar.servers.wire.messages import ReplyHeader
from seqpar.servers.wire.versions import VERSIONS, joined
from tests.support.faults import LIMIT
from tests.support.processes import PROCESSES

VERSION = VERSIONS[0]
MESSAGES = VERSION.messages
CHUNK = bytes(2**21)
ESCAPES = "\x1b[2J\x1b]0;owned\x07\r\n"


def welcome(**changes):
    """Return the first event of a session."""
    fields = {
        "session": b"s" * 16, "library": "0.1.0", "device": "cpu", "tokens": 2**20,
        "bytes": 2**30, "requests": 32,
    }  # fmt: skip
    message = MESSAGES.Welcome(**fields | changes)
    return MESSAGES.SessionEvent(welcome=message).SerializeToString()


def state(**fields):
    """Return an event that tells the server's state; its caches have much free memory."""
    message = MESSAGES.ServerState(**{"cache_room": 2**40} | fields)
    return MESSAGES.SessionEvent(state=message).SerializeToString()


def reply(data=b"", checksum=0, seconds=0.0):
    return VERSION.reply(ReplyHeader(checksum, seconds, True), [data])


def behaves(context, first=None):
    """Yield the events of a session that keeps to the rules."""
    yield first or welcome()
    while True:
        yield state()
        time.sleep(0.1)


def silent(requests, context):
    """Read a request and answer nothing."""
    next(requests)
    while context.is_active():
        time.sleep(0.05)
    yield from ()


def never_reads(requests, context):
    while context.is_active():
        time.sleep(0.05)
    yield from ()


def endless(*head, chunk):
    """Answer a request with some messages, and then repeat the last message for ever."""

    def compute(requests, context):
        next(requests)
        yield from head
        yield from itertools.repeat(chunk)

    return compute


def answers(*replies):
    def compute(requests, context):
        next(requests)
        yield from replies

    return compute


def trickles(requests, context):
    next(requests)
    yield reply()
    while context.is_active():
        time.sleep(0.05)
        yield joined(b"", [b"x"])


def fails(code, details):
    """End the call with this status."""

    def compute(requests, context):
        context.abort(code, details)
        yield from ()

    return compute


def ends_with_an_unknown_status(requests, context):
    """End the call with the status 99, which has no name."""
    _common.STATUS_CODE_TO_CYGRPC_STATUS_CODE["unknown"] = 99
    context.set_code("unknown")
    yield from ()


def of_events(*events):
    def session(context):
        yield from events

    return session


def floods(event):
    def session(context):
        yield welcome()
        yield from itertools.repeat(event)

    return session


class Attack(NamedTuple):
    """What a hostile server does in place of the right behaviour.

    Attributes:
        compute: a function of the requests of a call and its context that yields replies.
        session: a function of a context that yields events.
    """

    compute: object = silent
    session: object = behaves


Code = grpc.StatusCode
IN_COMPUTE = {
    "endless data": endless(reply(CHUNK), chunk=joined(b"", [CHUNK])),
    "endless messages without data": endless(reply(), chunk=b"\x7a\x00"),
    "endless headers": endless(chunk=reply()),
    "a wrong length": answers(reply(), b"\x7a\x05abc"),
    "a length without end": answers(reply(), b"\x7a" + b"\xff" * 1000),
    "a huge length": answers(reply(), b"\x7a\xff\xff\xff\xff\xff\xff\xff\xff\x7f"),
    "a wrong checksum": endless(reply(checksum=1), chunk=joined(b"", [b"x"])),
    "a message that is none": answers(b"\xff" * 100),
    "a later message that is none": answers(reply(), b"\xff" * 100),
    "an empty later message": answers(reply(), b""),
    "a message above the limit": answers(bytes(2**23)),
    "no reply": answers(),
    "an early end": answers(reply(b"x")),
    "a text with escape codes": fails(Code.INTERNAL, ESCAPES),
    "a huge text": fails(Code.INTERNAL, "x" * 2**20),
    "an unknown status": ends_with_an_unknown_status,
    "an unknown session": fails(Code.FAILED_PRECONDITION, "session"),
    "always busy": fails(Code.RESOURCE_EXHAUSTED, "busy"),
    "always leaving": fails(Code.UNAVAILABLE, "leaving"),
    "silence": silent,
    "requests that are not read": never_reads,
    "a trickle": trickles,
}
IN_SESSION = {
    "no event": of_events(),
    "an end after the welcome": of_events(welcome()),
    "an end after the state": of_events(welcome(), state()),
    "a state first": of_events(state()),
    "two welcomes": of_events(welcome(), welcome()),
    "a welcome after the state": of_events(welcome(), state(), welcome()),
    "an event that is none": of_events(b"\xff" * 100),
    "an empty event": of_events(b""),
    "an event above the limit": of_events(bytes(2**23)),
    "no requests": of_events(welcome(requests=0), state()),
    "no tokens": functools.partial(behaves, first=welcome(tokens=0)),
    "a huge session": functools.partial(behaves, first=welcome(session=bytes(2**22 - 2**8))),
    "a device with escape codes": functools.partial(behaves, first=welcome(device=ESCAPES)),
    "endless states": floods(state()),
    "endless changes": floods(state(draining=True)),
    "endless large states": floods(state() + joined(b"", [CHUNK])),
}  # fmt: skip
ATTACKS = {name: Attack(compute=x) for name, x in IN_COMPUTE.items()}
ATTACKS |= {name: Attack(session=x) for name, x in IN_SESSION.items()}


def _serve(path, name, pipe):
    """Run in the process of a hostile server."""
    attack = ATTACKS[name]
    handlers = {
        "Session": grpc.unary_stream_rpc_method_handler(
            lambda request, context: attack.session(context)
        ),
        "Compute": grpc.stream_stream_rpc_method_handler(attack.compute),
    }
    options = [("grpc.max_send_message_length", -1), ("grpc.max_metadata_size", 2**24)]
    server = grpc.server(ThreadPoolExecutor(64), options=options)
    handler = grpc.method_handlers_generic_handler(VERSION.service, handlers)
    server.add_generic_rpc_handlers((handler,))
    os.umask(0o177)  # a pool refuses a socket to which other users have access
    server.add_insecure_port(f"unix:{path}")
    server.start()
    pipe.send(None)
    server.wait_for_termination()


@contextlib.contextmanager
def hostile_server(path, name):
    """Within this context, a server makes the attack of this name; yield its address."""
    ours, theirs = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_serve, args=(path, name, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(LIMIT), "the server does not start"
        ours.recv()
        yield f"ipc://{path}"
    finally:
        process.kill()
        process.join(LIMIT)

"""Open connections to a server that claim routing ids: none may end it or reach another client.

Run it as `python -m tests.tools.hostile_connections`. libzmq numbers the peers of a ROUTER socket,
and aborts the process if a peer has claimed the next number. Connections claim the numbers that
come next, the number of a living client, and ids of any length, over TCP and a Unix socket, with
and without keys. An honest client has tasks computed meanwhile, and checks every bit.
"""

import argparse
import contextlib
import itertools
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import zmq

from seqpar.servers.transport.curve_keys import client_keys, generate, server_keys
from seqpar.servers.transport.sockets import secure
from seqpar.servers.wire.codec import pack
from seqpar.servers.wire.protocol import Ping, encode
from tests.support.requests import random_request
from tests.support.servers import Client, ServerProcess, right_answer

_BATCH = 100  # connections that are open together
EVERY_KIND = list(itertools.product(["ipc", "tcp"], [False, True]))
REQUEST = random_request(0, 16, 32)


_NUMBERS = """
import zmq
context = zmq.Context()
for i in range(3):
    server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    server.bind(f"inproc://{i}")
    client.connect(f"inproc://{i}")
    client.send(b"")
    print(int.from_bytes(server.recv()[1:], "big"))
context.destroy(0)
"""


def first_numbers():
    """The numbers of the first peers of the first sockets in a fresh process.

    The server's socket is one of the first; with keys, that which checks keys comes before it.
    """
    return [int(x) for x in subprocess.check_output([sys.executable, "-c", _NUMBERS]).split()]


def claims(numbers):
    """Ids that connections claim, without an end: most are numbers that may come next."""
    for i in itertools.count():
        for number in numbers:
            yield b"\0" + struct.pack(">I", (number + i) % 2**32)
            yield b"\0" + struct.pack(">I", (number + 2 * i + 16) % 2**32)
        yield (b"victim", b"\xff" * 255, b"\0", b"")[i % 4]


def attack(server, keys, count):
    """Open so many hostile connections; return how many answers an honest client had."""
    ids, answers = claims(first_numbers()), 0
    with Client(server.address, keys) as honest, zmq.Context() as context:
        for _ in range(0, count, _BATCH):
            with contextlib.ExitStack() as stack:
                for _ in range(_BATCH):
                    socket = stack.enter_context(context.socket(zmq.DEALER))
                    socket.linger = 0
                    if routing_id := next(ids):
                        socket.routing_id = routing_id
                    secure(socket, keys)
                    socket.connect(server.address)
                    socket.send(encode(Ping(honest.generation)))
                    # The last one's answer says that the server has let it in.
                assert socket.poll(20_000), "the server says nothing"
                assert right_answer(*honest.ask(pack(REQUEST)), REQUEST)
                answers += 1
        assert server.process.is_alive()
    return answers


def attack_all(count, folder, kinds):
    """Attack a server of each of these kinds: its kind of address, and whether it has keys."""
    generate(folder / "keys")
    for kind, secured in kinds:
        address = f"ipc://{folder}/s" if kind == "ipc" else "tcp://127.0.0.1:*"
        keys = folder / "keys" if secured else None
        options = {} if keys is None else {"keys": server_keys(keys)}
        server = ServerProcess(address, **options)
        try:
            answers = attack(server, keys and client_keys(keys), count)
        finally:
            server.end()
        print(f"{kind} {'with' if secured else 'without'} keys: {answers} right answers")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=10_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        attack_all(arguments.connections // len(EVERY_KIND), Path(folder), EVERY_KIND)


if __name__ == "__main__":
    main()

"""Measure the latency of an honest client while other keys keep a server busy.

An honest client sends one task after another to a server with keys. Its latency is measured while
the server is otherwise idle, while a hostile key has many connections that use all their credits,
while a hostile key has tasks with 16 times the work, and while other keys, with one connection
each, always have tasks of the same size in flight. The latency should be at most three times the
idle one next to a hostile key, and n + 1 times next to n busy keys. Answers are checked first, bit
for bit. All states alternate in each round.

A second server is flooded: a hostile key sends payloads over several connections and never waits
for replies. The server ends its connections when they exceed their credits, and then refuses the
key for a while. A flood lasts longer than the first refusal, and each flood takes a new key. Real
attackers run on other machines; here they may use one of two cores.

Each state is measured from its start. A round's latency is the mean of its tasks, and `slow` the
seconds of tasks that took more than three times the client's own latency.
"""

from __future__ import annotations

import argparse
import os
import socket as system
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import zmq

from benchmarks import RESULTS, harness
from benchmarks.servers.processes import LIMIT, Peer, Server, check, connect, folder, task
from seqpar.servers.transport.curve_keys import client_keys, generate
from seqpar.servers.transport.sockets import secure
from seqpar.servers.wire import protocol
from seqpar.servers.wire.codec import Packed, pack
from seqpar.servers.wire.protocol import library_version

Row = dict[str, Any]
TOKENS, DEPTH = 512, 4  # of a task; tasks that a busy key has in flight
CONNECTIONS = 120  # of the hostile key, each with DEPTH tasks; it gets no more leases
# The hostile key's tasks: tokens, connections, and most tasks per connection.
MANY_TASKS = TOKENS, CONNECTIONS, 1024
LARGE_TASKS = 4 * TOKENS, 8, 1
BUSY = (1, 2, 4)  # keys
FLOODS = (1, 8, 40, 120)  # connections that never wait for replies
_SLOW = 3.0  # times as long as alone
FLOOD_SECONDS = 15.0  # the server refuses a key for 10 s


def keys_for(path: Path, clients: int) -> tuple[Path, list[Path]]:
    """Make the keys of a server and of trusted clients. Returns all folders."""
    server = path / "server"
    generate(server)
    found = []
    for i in range(clients):
        own = path / f"client-{i}"
        generate(own)
        (own / "server.public").write_bytes((server / "server.public").read_bytes())
        public = (own / "client.public").read_bytes()
        (server / "trusted" / f"{i}.public").write_bytes(public)
        found.append(own)
    return server, found


def honest(pipe: Any, address: str, keys: Path) -> None:
    """Send the latencies of consecutive tasks between two times."""
    request = task(TOKENS)
    with connect([address], "zmq", keys=keys, depth=1) as pool:
        check(pool, [request])
        pipe.send("ready")
        while True:
            start, stop = pipe.recv()
            time.sleep(max(0.0, start - time.monotonic()))
            found: list[float] = []
            while (before := time.monotonic()) < stop or not found:
                pool.submit(request).result(LIMIT)
                found.append(time.monotonic() - before)
            pipe.send(found)


def busy(pipe: Any, address: str, keys: Path) -> None:
    """Keep tasks in flight between two times."""
    request = task(TOKENS)
    with connect([address], "zmq", keys=keys, depth=DEPTH) as pool:
        check(pool, [request])
        pipe.send("ready")
        while True:
            start, stop = pipe.recv()
            time.sleep(max(0.0, start - time.monotonic()))
            flying = deque(pool.submit(request) for _ in range(DEPTH))
            count = 0
            while flying:
                flying.popleft().result(LIMIT)
                count += 1
                if time.monotonic() < stop:
                    flying.append(pool.submit(request))
            pipe.send(count)


class Connection:
    """A connection of the hostile key, which implements the protocol itself."""

    def __init__(self, context: zmq.Context[Any], address: str, keys: Path) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        secure(self.socket, client_keys(keys))
        self.socket.connect(address)
        self._number = 0
        hello = protocol.Hello(library_version(), "hostile", ["zmq"], [])
        end = time.monotonic() + LIMIT
        self.socket.send(protocol.encode(hello))
        while not isinstance(welcome := self._receive(), protocol.Welcome):
            if time.monotonic() > end:
                raise SystemExit(f"no lease: {welcome}")
            time.sleep(0.1)  # the server still ends leases of an earlier flood
            self.socket.send(protocol.encode(hello))
        self._generation, self._secret = welcome.generation, welcome.secret
        self.credits = welcome.credits

    def ask(self, packed: Packed) -> None:
        """Send a task, and bytes that are not a message."""
        self._number += 1
        header = packed.numbered(self._generation, self._number)
        data = protocol.encode(header, self._secret)
        self.socket.send_multipart([data, *packed.parts])
        self.socket.send(b"no message")

    def ping(self) -> None:
        """Renew the lease."""
        self.socket.send(protocol.encode(protocol.Ping(self._generation), self._secret))

    def answered(self) -> bool:
        """Read a message. Returns whether a task has ended."""
        return isinstance(self._receive(), protocol.Result | protocol.Failed | protocol.Busy)

    def _receive(self) -> protocol.Message:
        if not self.socket.poll(int(1000 * LIMIT)):
            raise SystemExit("the server does not answer")
        data = self.socket.recv()
        for _ in range(protocol.frames_after(data)):
            self.socket.recv()
        return protocol.decode(data)


def hostile(pipe: Any, address: str, keys: Path) -> None:
    """Keep tasks of many connections in flight between two times."""
    with zmq.Context() as context:
        connections = {
            x.socket: x for x in (Connection(context, address, keys) for _ in range(CONNECTIONS))
        }
        poller = zmq.Poller()
        for socket in connections:
            poller.register(socket, zmq.POLLIN)
        tasks = {tokens: pack(task(tokens)) for tokens, *_ in (MANY_TASKS, LARGE_TASKS)}
        packed = tasks[TOKENS]
        pipe.send("ready")
        flying = count = 0
        stop, ping = 0.0, 0.0
        while True:
            now = time.monotonic()
            if pipe.poll(0 if flying else 0.01):
                start, stop, (tokens, number, depth) = pipe.recv()
                packed = tasks[tokens]
                time.sleep(max(0.0, start - time.monotonic()))
                for connection in list(connections.values())[:number]:
                    for _ in range(min(depth, connection.credits)):
                        connection.ask(packed)
                        flying += 1
                count = 0
            if now > ping:
                ping = now + 1.0
                for connection in connections.values():
                    connection.ping()
            for socket, _ in poller.poll(10):
                if connections[socket].answered():
                    flying -= 1
                    count += 1
                    if time.monotonic() < stop:
                        connections[socket].ask(packed)
                        flying += 1
                    elif not flying:
                        pipe.send(count)


def flood(pipe: Any, address: str, keys: Sequence[Path]) -> None:
    """Send payloads over new connections between two times, without waiting for replies.

    Each flood takes the next key.
    """
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    packed = pack(task(TOKENS))
    pipe.send("ready")
    for own in keys:
        count, context = 0, zmq.Context()
        poller, connections = zmq.Poller(), {}
        for _ in range(pipe.recv()):
            connection = Connection(context, address, own)
            connection.socket.sndtimeo = 0
            connections[connection.socket] = connection
            poller.register(connection.socket, zmq.POLLIN | zmq.POLLOUT)
        pipe.send("connected")
        start, stop = pipe.recv()
        time.sleep(max(0.0, start - time.monotonic()))
        while time.monotonic() < stop:
            for socket, events in poller.poll(10):
                if events & zmq.POLLIN:
                    socket.recv()
                if events & zmq.POLLOUT:
                    with suppress(zmq.Again):  # the server has ended the connection
                        connections[socket].ask(packed)
                        count += 1
        context.destroy(linger=0)
        pipe.send(count)


@dataclass(frozen=True)
class State:
    """Work of other keys while the honest client's latency is measured.

    Attributes:
        name: of the state.
        bound: how many times its own latency the honest client may wait.
        peers: the other keys' processes, each with arguments that follow the times.
        flood: the number of a flood's connections, which the first peer gets before the times.
    """

    name: str
    bound: float
    peers: Sequence[tuple[Peer, tuple[Any, ...]]] = ()
    flood: int = 0


def keyed_server(stack: ExitStack, clients: int) -> tuple[str, list[Path]]:
    """Start a server; return its address and the clients' folders of keys."""
    server_keys, keys = keys_for(Path(stack.enter_context(folder())), clients)
    with system.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    stack.enter_context(Server(address, "zmq", keys=server_keys)).status(keys[0])
    return address, keys


def busy_keys(stack: ExitStack) -> tuple[Peer, list[State]]:
    """Start a server and its clients; return the honest one and the states."""
    address, (own, second, *rest) = keyed_server(stack, 2 + max(BUSY))
    measured = stack.enter_context(Peer(honest, address, own))
    attacker = stack.enter_context(Peer(hostile, address, second))
    others = [stack.enter_context(Peer(busy, address, x)) for x in rest]
    for peer in (measured, attacker, *others):
        peer.hear()
    states = [
        State("alone", 1.0),
        State("hostile", 3.0, [(attacker, (MANY_TASKS,))]),
        State("hostile, large tasks", 3.0, [(attacker, (LARGE_TASKS,))]),
    ]
    states += [State(f"{n} busy", n + 1.0, [(x, ()) for x in others[:n]]) for n in BUSY]
    return measured, states


def floods(stack: ExitStack, rounds: int) -> tuple[Peer, list[State]]:
    """Start a server, its honest client and floods; return the client and the states."""
    address, (own, *others) = keyed_server(stack, 1 + rounds * len(FLOODS))
    measured = stack.enter_context(Peer(honest, address, own))
    attacker = stack.enter_context(Peer(flood, address, others))
    for peer in (measured, attacker):
        peer.hear()
    states = [State(f"flood of {n}", 3.0, [(attacker, ())], n) for n in FLOODS]
    return measured, [State("alone", 1.0), *states]


def measure(
    start_all: Callable[[ExitStack], tuple[Peer, list[State]]],
    rounds: int,
    seconds: float,
    begin: Callable[[str], None],
) -> list[Row]:
    """Return the honest client's mean latency in each state, over its own in the same round.

    The first state gives its own latency.
    """
    with ExitStack() as stack:
        measured, states = start_all(stack)
        found: list[list[list[float]]] = [[] for _ in states]
        served: list[list[int]] = [[] for _ in states]
        for turn in range(rounds):
            for i in range(len(states)):
                at = (turn + i) % len(states)
                state = states[at]
                begin(f"{state.name}, round {turn + 1} of {rounds}")
                if state.flood:
                    state.peers[0][0].pipe.send(state.flood)
                    state.peers[0][0].hear()
                start = time.monotonic() + 0.1
                times = start, start + (FLOOD_SECONDS if state.flood else seconds)
                measured.pipe.send(times)
                for peer, told in state.peers:
                    peer.pipe.send((*times, *told))
                found[at].append(measured.hear())
                served[at].append(sum(peer.hear() for peer, _ in state.peers))
    own = [statistics.fmean(tasks) for tasks in found[0]]
    rows = []
    for state, all_tasks, tasks_of_peers in zip(states, found, served, strict=True):
        latencies = [statistics.fmean(tasks) for tasks in all_tasks]
        ratios = [x / alone for x, alone in zip(latencies, own, strict=True)]
        slow = [
            sum(x for x in tasks if x > _SLOW * alone)
            for tasks, alone in zip(all_tasks, own, strict=True)
        ]
        row = {"state": state.name, "bound": state.bound, "ratio": statistics.median(ratios)}
        row |= {"latencies": latencies, "ratios": ratios, "slow": slow, "tasks": tasks_of_peers}
        rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the latencies as a table."""
    columns = "others", "latency, ms", "over its own", "at most", "met", "slow, s"
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        latency = 1000 * statistics.median(row["latencies"])
        met = "yes" if row["ratio"] <= row["bound"] else "no"
        slow = statistics.median(row["slow"])
        cells = row["state"], f"{latency:.2f}", f"{row['ratio']:.2f}", f"{row['bound']:.0f}", met
        lines.append(f"| {' | '.join(cells)} | {slow:.1f} |")
    return "\n".join(lines)


def main() -> int:
    """Measure, print, and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds",
        type=float,
        default=5.0,
        help="seconds of each state in a round, without floods",
    )
    parser.add_argument("--no-write", action="store_true", help="only print: write no result file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = harness.canary()
    states = 3 + len(BUSY), 1 + len(FLOODS)
    with harness.progress(options.rounds * sum(states)) as begin:
        rows = measure(busy_keys, options.rounds, options.seconds, begin)
        rows += measure(
            partial(floods, rounds=options.rounds), options.rounds, options.seconds, begin
        )
    after = harness.canary()
    print(table(rows))
    drift = harness.check_canary(before, after)
    if not options.no_write:
        shape = {"tokens": TOKENS, "depth": DEPTH, "connections of the hostile key": CONNECTIONS}
        shape["tokens of large tasks"] = LARGE_TASKS[0]
        harness.write(
            RESULTS, "servers-fairness", {"shape": shape, "canary_drift": drift, "rows": rows}
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

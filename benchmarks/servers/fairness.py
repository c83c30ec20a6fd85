"""Measure the latency of an honest client while other certificates keep a server busy.

An honest client sends one task after another to a server with keys. Its latency is measured while
the server is otherwise idle, and while other certificates do one of these:

- one hostile certificate keeps as many tasks in flight as 120 sessions may have, or tasks with 16
  times the work, and sends messages that are malformed;
- it floods the server with payloads over several connections, and neither reads results nor waits
  for them; or four hostile certificates flood it in turn;
- it makes control calls over 1,000 connections, each as soon as its last one is answered;
- other clients, with a certificate and a connection each, always have tasks of the same size in
  flight.

Next to hostile certificates, the latency in the worst half second should be at most three times the
mean latency alone. Next to n busy clients, the mean latency should be at most n + 1 times as high.
Answers are checked first, bit for bit. All states alternate in each round, and each state is
measured from its start. Real attackers run on other machines; here they may use one of two cores.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import statistics
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import torch

from benchmarks import harness
from benchmarks.servers.processes import LIMIT, Peer, Server, check, connect, folder, task
from seqpar.servers.transport.authority import add_client, generate
from seqpar.servers.transport.certificates import ClientIdentity
from seqpar.servers.transport.options import open_channel
from seqpar.servers.transport.routes import Route
from seqpar.servers.wire.codec import Packed, pack
from seqpar.servers.wire.payload import chunks
from seqpar.servers.wire.versions import VERSIONS, joined

Row = dict[str, Any]
TOKENS, DEPTH = 512, 4  # of a task; tasks that a busy client has in flight
BUSY = (1, 2, 4)  # clients
KEYS = 4  # hostile certificates
_SLOW = 3.0  # times as long as alone
_WINDOW = 0.5  # seconds
_UNREAD = 64  # calls that each connection of a flood keeps open
_VERSION = VERSIONS[0]


@dataclass(frozen=True)
class Attack:
    """What hostile certificates do.

    Attributes:
        kind: "tasks", "flood" or "control".
        connections: their number, of each certificate.
        tokens: of a task.
        depth: the most tasks of a connection.
        keys: the certificates, which take turns.
    """

    kind: str
    connections: int
    tokens: int = TOKENS
    depth: int = 1024
    keys: int = 1


ATTACKS = {
    "hostile": Attack("tasks", 120),
    "hostile, large tasks": Attack("tasks", 8, 4 * TOKENS, 1),
    **{f"flood of {n}": Attack("flood", n) for n in (1, 8, 40, 120)},
    "floods of 40 in turn": Attack("flood", 40, keys=KEYS),
    "control calls of 1,000": Attack("control", 1000),
}
STATES = [*ATTACKS, *(f"{n} busy" for n in BUSY)]


def honest(pipe: Any, address: str, keys: Path) -> None:
    """Send the latencies of consecutive tasks between two times."""
    request = task(TOKENS)
    with connect([address], "grpc", keys=keys, depth=1) as pool:
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
    with connect([address], "grpc", keys=keys, depth=DEPTH) as pool:
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
    """A connection of a hostile certificate, which makes the calls itself."""

    def __init__(self, address: str, keys: ClientIdentity) -> None:
        self.channel = open_channel(Route(address, True), keys, LIMIT)
        self.calls = 0

    async def begin(self) -> None:
        """Begin a session."""
        request = _VERSION.messages.SessionRequest(client="hostile")
        begin = self.channel.unary_stream(f"/{_VERSION.service}/Session")
        self._session = begin(request.SerializeToString(), wait_for_ready=True)
        event = _VERSION.messages.SessionEvent.FromString(await self._session.read())
        self.welcome = event.welcome

    async def ask(self) -> None:
        """Make a control call; wait for the answer."""
        status = self.channel.unary_unary(f"/{_VERSION.service}/Status")
        await status(b"", wait_for_ready=True)
        self.calls += 1

    async def send(self, packed: Packed | None) -> Any:
        """Begin a call with a task, or with a message that is malformed; return the call."""
        call = self.channel.stream_stream(f"/{_VERSION.service}/Compute")(timeout=LIMIT)
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it was refused
            if packed is None:
                await call.write(b"no message")
            else:
                pieces = chunks(packed.parts)
                header = packed.header(self.welcome.session)
                await call.write(_VERSION.request(header, next(pieces)))
                for piece in pieces:
                    await call.write(joined(b"", piece))
            await call.done_writing()
        self.calls += 1
        return call

    async def tasks(self, packed: Packed) -> None:
        """Send tasks and malformed messages one after another, and read the results."""
        while True:
            for sent in (packed, None):
                call = await self.send(sent)
                with suppress(grpc.aio.AioRpcError):
                    while await call.read() is not grpc.aio.EOF:
                        pass

    async def flood(self, packed: Packed) -> None:
        """Send tasks without reading results."""
        unread: deque[Any] = deque()
        while True:
            unread.append(await self.send(packed))
            if len(unread) > _UNREAD:
                unread.popleft().cancel()

    async def control(self) -> None:
        """Make control calls one after another."""
        while True:
            await self.ask()


def attack(pipe: Any, address: str, folders: Sequence[Path]) -> None:
    """Make an attack between two times, as often as it is told to; send the number of calls."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    keys = [ClientIdentity(x) for x in folders]
    packed = {tokens: pack(task(tokens)) for tokens in {x.tokens for x in ATTACKS.values()}}
    pipe.send("ready")

    async def run(told: Attack) -> int:
        groups = []
        for own in keys[: told.keys]:
            groups.append([Connection(address, own) for _ in range(told.connections)])
            for connection in groups[-1]:
                await (connection.ask() if told.kind == "control" else connection.begin())
        pipe.send("connected")
        start, stop = pipe.recv()
        for turn, group in enumerate(groups):
            first, last = (start + x * (stop - start) / told.keys for x in (turn, turn + 1))
            await asyncio.sleep(max(0.0, first - time.monotonic()))
            work = packed[told.tokens]
            flows: list[Any] = []
            for x in group:
                if told.kind == "tasks":
                    depth = min(told.depth, x.welcome.requests)
                    flows += [x.tasks(work) for _ in range(depth)]
                else:
                    flows.append(x.flood(work) if told.kind == "flood" else x.control())
            with suppress(TimeoutError):
                async with asyncio.timeout(last - time.monotonic()):
                    await asyncio.gather(*flows)
        for group in groups:
            await asyncio.gather(*(x.channel.close() for x in group))
        return sum(x.calls for group in groups for x in group)

    async def listen() -> None:
        while True:
            pipe.send(await run(pipe.recv()))

    asyncio.run(listen())


@dataclass(frozen=True)
class State:
    """Work of others while the honest client's latency is measured.

    Attributes:
        name: of the state.
        bound: how many times its own latency the honest client may wait.
        peers: the others' processes, which get the times.
        attack: what the only peer is told before.
    """

    name: str
    bound: float
    peers: Sequence[Peer] = ()
    attack: Attack | None = None


def start_all(stack: ExitStack) -> tuple[Peer, list[State]]:
    """Start a server and its clients; return the honest client and the states."""
    path = Path(stack.enter_context(folder()))
    generate(path)
    names = [str(i) for i in range(1 + KEYS + max(BUSY))]
    for name in names:
        add_client(path, name)
    own, *others = [path / "clients" / name for name in names]
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    stack.enter_context(Server(address, "grpc", keys=path)).wait(own)
    measured = stack.enter_context(Peer(honest, address, own))
    attacker = stack.enter_context(Peer(attack, address, others[:KEYS]))
    clients = [stack.enter_context(Peer(busy, address, x)) for x in others[KEYS:]]
    for peer in (measured, attacker, *clients):
        peer.hear()
    states = [State("alone", _SLOW)]
    states += [State(name, _SLOW, [attacker], x) for name, x in ATTACKS.items()]
    return measured, states + [State(f"{n} busy", n + 1.0, clients[:n]) for n in BUSY]


def worst(latencies: Sequence[float]) -> float:
    """Return the highest mean latency of consecutive tasks that begin within half a second."""
    means = []
    for i in range(len(latencies)):
        after, seconds = i, 0.0
        while after < len(latencies) and seconds < _WINDOW:
            seconds += latencies[after]
            after += 1
        means.append(seconds / (after - i))
    return max(means)


def measured_states(
    only: Sequence[str], rounds: int, seconds: float, begin: Callable[[str], None]
) -> list[Row]:
    """Return the honest client's latency in each state, over its mean latency alone.

    `only` are the states that are measured next to "alone".
    """
    with ExitStack() as stack:
        measured, states = start_all(stack)
        states = [x for x in states if x.name in ("alone", *only)]
        found: list[list[list[float]]] = [[] for _ in states]
        calls: list[list[int]] = [[] for _ in states]
        for turn, at in harness.turns(range(len(states)), rounds):
            state = states[at]
            begin(f"{state.name}, round {turn + 1} of {rounds}")
            if state.attack is not None:
                state.peers[0].pipe.send(state.attack)
                state.peers[0].hear()
            start = time.monotonic() + 0.1
            for peer in (measured, *state.peers):
                peer.pipe.send((start, start + seconds))
            found[at].append(measured.hear())
            calls[at].append(sum(peer.hear() for peer in state.peers))
    own = [statistics.fmean(tasks) for tasks in found[0]]
    rows = []
    for state, all_tasks, calls_of_peers in zip(states, found, calls, strict=True):
        pairs = list(zip(all_tasks, own, strict=True))
        row: Row = {"state": state.name, "bound": state.bound, "calls": calls_of_peers}
        row["latencies"] = [statistics.fmean(tasks) for tasks in all_tasks]
        row["mean"] = statistics.median(statistics.fmean(x) / alone for x, alone in pairs)
        row["worst"] = statistics.median(worst(x) / alone for x, alone in pairs)
        row["slow"] = [sum(x for x in xs if x > _SLOW * alone) for xs, alone in pairs]
        row["ratio"] = row["mean"] if "busy" in state.name else row["worst"]
        rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> str:
    columns = (
        "others",
        "latency, ms",
        "mean over alone",
        "worst half second",
        "at most",
        "met",
        "slow, s",
    )
    lines = []
    for row in rows:
        latency = 1000 * statistics.median(row["latencies"])
        met = "yes" if row["ratio"] <= row["bound"] else "no"
        ratios = [f"{row[name]:.2f}" for name in ("mean", "worst")]
        slow = statistics.median(row["slow"])
        cells = row["state"], f"{latency:.2f}", *ratios, f"{row['bound']:.0f}", met
        lines.append([*cells, f"{slow:.1f}"])
    return harness.table(columns, lines)


def measure(options: Namespace) -> Row:
    torch.set_num_threads(1)
    options.no_write |= options.only != STATES
    with harness.progress(options.rounds * (1 + len(options.only))) as begin:
        rows = measured_states(options.only, options.rounds, options.seconds, begin)
    print(table(rows))
    return {"shape": {"tokens": TOKENS, "depth": DEPTH}, "rows": rows}


ARGUMENTS = {
    "--rounds": 3,
    "--seconds": (6.0, "seconds of each state in a round"),
    "--only": (STATES, "states next to alone; a part of them is not written", STATES),
}

if __name__ == "__main__":
    harness.run("servers-fairness", __doc__, ARGUMENTS, measure)

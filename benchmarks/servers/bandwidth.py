"""Compare payloads between two processes, by our transports, by plain NIXL and by plain pyzmq.

The next payload is sent after the last one has arrived. Each way to send has its own receiving
process, and rounds interleave all ways.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import zmq
from numpy.typing import NDArray

from benchmarks.servers.processes import Peer, folder
from seqpar.servers.transport.choose import own_name
from seqpar.servers.transport.client_socket import ClientSocket
from seqpar.servers.transport.one_sided import OneSided, available
from seqpar.servers.transport.server_socket import ServerSocket
from seqpar.servers.transport.zeromq import ArenaTarget, Frames, Sending, Transport
from seqpar.servers.wire.arena import ALIGNMENT
from seqpar.servers.wire.limits import Limits, ServerDeadlines

Row = dict[str, Any]
Bytes = NDArray[np.uint8]


class Way(NamedTuple):
    """A way to send: a function that sends one payload, and the receiving process, if it spins."""

    send: Callable[[Bytes], None]
    spinning: Peer | None = None


MIB = 2**20
SIZES = [2**16, MIB, 8 * MIB, 64 * MIB]
PEERS = {"nixl": "NIXL alone", "zmq": "pyzmq alone"}
BYTES = 128 * MIB  # the least bytes per round
MOST = 64  # payloads per round
_PATIENCE = 60.0  # seconds


def measure(rounds: int, begin: Callable[[str], None]) -> list[Row]:
    """Return a row for each size: bytes per second of each way, and ratios of ours to its peer."""
    rows = []
    with ExitStack() as stack:
        ways = {"pyzmq alone": bare_zmq, "zmq": frames}
        if available():
            ways |= {"NIXL alone": bare_nixl, "nixl": one_sided}
        sends = {name: stack.enter_context(way()) for name, way in ways.items()}
        for size in SIZES:
            begin(f"bandwidth at {size / MIB:g} MiB")
            data = memory(size)
            data[:] = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
            rates: dict[str, list[float]] = {name: [] for name in sends}
            names = list(sends)
            for turn in range(rounds + 1):
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    rates[name].append(_rate(sends[name], data))
            rates = {name: found[1:] for name, found in rates.items()}  # the first round warms up
            rows.append({"size": size, "rates": rates, "of_peer": _ratios(rates)})
    return rows


def memory(size: int) -> Bytes:
    """Return `size` bytes of memory, aligned like a tensor."""
    found = np.zeros(size + ALIGNMENT, np.uint8)
    skipped = -found.ctypes.data % ALIGNMENT
    return found[skipped : skipped + size]


def _rate(way: Way, data: Bytes) -> float:
    times = max(2, min(MOST, BYTES // data.size))
    if way.spinning is not None:
        way.spinning.pipe.send("go")
    way.send(data)
    start = time.perf_counter()
    for _ in range(times):
        way.send(data)
    seconds = time.perf_counter() - start
    if way.spinning is not None:
        way.spinning.pipe.send("rest")
    return times * data.size / seconds


def _spin(pipe: Any, poll: Callable[[], object]) -> None:
    """Poll for writes, as a NIXL agent must, from each start message until the next stop."""
    while True:
        pipe.recv()
        while not pipe.poll():
            for _ in range(100):
                poll()
        pipe.recv()


def _ratios(rates: dict[str, list[float]]) -> dict[str, float]:
    """Return the median over rounds of our rate over the peer's in the same round."""
    return {
        name: statistics.median(x / y for x, y in zip(rates[name], rates[peer], strict=True))
        for name, peer in PEERS.items()
        if name in rates
    }


def table(rows: Sequence[Row]) -> str:
    """Return a table of the medians."""
    lines = ["| payload, MiB | transport | ours, GB/s | its peer, GB/s | ours / peer |", "|---" * 5]
    for row in rows:
        for name, ratio in row["of_peer"].items():
            ours, peer = (statistics.median(row["rates"][x]) / 1e9 for x in (name, PEERS[name]))
            of = PEERS[name]
            lines.append(
                f"| {row['size'] / MIB:g} | {name} | {ours:.2f} | {peer:.2f} ({of}) | {ratio:.3f} |"
            )
    return "\n".join(lines)


@contextmanager
def bare_zmq() -> Iterator[Way]:
    """Send by pyzmq, without copies; the receiver reports each payload."""
    with folder() as sockets, zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        address = f"ipc://{sockets}/s"
        with Peer(_bare_zmq_receiver, address) as peer:
            peer.hear()
            socket.linger = 0
            socket.connect(address)

            def send(data: Bytes) -> None:
                socket.send(data.data, copy=False)
                socket.recv()

            yield Way(send)


def _bare_zmq_receiver(pipe: Any, address: str) -> None:
    socket = zmq.Context().socket(zmq.PAIR)
    socket.bind(address)
    pipe.send("ready")
    while True:
        frame = socket.recv(copy=False)
        socket.send(b"")
        del frame


@contextmanager
def frames() -> Iterator[Way]:
    """Send by our sockets and ZeroMQ's transport, to a socket like a server's."""
    with folder() as sockets, zmq.Context() as context:
        address = f"ipc://{sockets}/s"
        with Peer(_frames_receiver, address) as peer:
            peer.hear()
            poller, transport = zmq.Poller(), Frames()
            dialled = ClientSocket(context, poller, address, None, _PATIENCE)

            def send(data: Bytes) -> None:
                sending = transport.begin(Sending("peer", b"task", _PATIENCE), [data], None)
                if reason := dialled.send([sending.message, *sending.frames]):
                    raise SystemExit(f"zmq: {reason}")
                while dialled.receive() is None:
                    poller.poll()

            yield Way(send)
            dialled.close(0)


def _frames_receiver(pipe: Any, address: str) -> None:
    bound = ServerSocket(address, None, Limits(), ServerDeadlines())
    transport, poller = Frames(), zmq.Poller()
    poller.register(bound.socket, zmq.POLLIN)
    pipe.send("ready")
    while True:
        poller.poll()
        if (received := bound.receive()) is not None:
            peer, (_, frame) = received
            transport.read(peer, [frame], [len(frame)], None)
            del received, frame  # its memory is reused for the next payload
            bound.send(peer, [b"there"])


@contextmanager
def bare_nixl() -> Iterator[Way]:
    """Write from registered memory to registered memory, by one prepared transfer."""
    from nixl._api import nixl_agent, nixl_agent_config  # quiet, since `available` was called

    agent = nixl_agent(f"bench-{own_name()}", nixl_agent_config(enable_prog_thread=False))
    source = memory(SIZES[-1])
    place = source.ctypes.data
    registered = agent.register_memory([(place, source.size, 0, "")], "DRAM")
    with Peer(_bare_nixl_receiver, SIZES[-1]) as peer:
        metadata, theirs = peer.hear()
        name = agent.add_remote_agent(metadata).decode()
        handles: dict[int, Any] = {}

        def handle(size: int) -> Any:
            descriptors = (agent.get_xfer_descs([(x, size, 0)], "DRAM") for x in (place, theirs))
            return agent.initialize_xfer("WRITE", *descriptors, name)

        def send(data: Bytes) -> None:
            if data.size not in handles:
                handles[data.size] = handle(data.size)
                source[: data.size] = data
            state = agent.transfer(handles[data.size])
            while state == "PROC":
                state = agent.check_xfer_state(handles[data.size])
            if state != "DONE":
                raise SystemExit("nixl: a transfer failed")

        yield Way(send, peer)
        for each in handles.values():
            agent.release_xfer_handle(each)
        agent.remove_remote_agent(name)
    agent.deregister_memory(registered)


def _bare_nixl_receiver(pipe: Any, size: int) -> None:
    from nixl._api import nixl_agent, nixl_agent_config  # quiet, since `available` was called

    agent = nixl_agent(f"bench-{own_name()}", nixl_agent_config(enable_prog_thread=False))
    room = memory(size)
    agent.register_memory([(room.ctypes.data, size, 0, "")], "DRAM")
    pipe.send((agent.get_agent_metadata(), room.ctypes.data))
    _spin(pipe, agent.get_new_notifs)


@contextmanager
def one_sided() -> Iterator[Way]:
    """Write from any memory to a peer's arena, by our transport."""
    transport = OneSided(f"bench-{own_name()}", MIB)
    with Peer(_one_sided_receiver, transport.open("peer", MIB), SIZES[-1]) as peer:
        transport.connect("peer", peer.hear())

        def send(data: Bytes) -> None:
            deadline = time.monotonic() + _PATIENCE
            sending = transport.begin(Sending("peer", b"task", deadline), [data], 0)
            while sending.moving:
                transport.progress(sending)
            if sending.error is not None:
                raise SystemExit(f"nixl: {sending.error}")

        yield Way(send, peer)
        transport.shutdown()


def _one_sided_receiver(pipe: Any, target: ArenaTarget, size: int) -> None:
    transport: Transport = OneSided(f"bench-{own_name()}", size)
    arena = transport.open("peer", size)
    transport.connect("peer", target)
    pipe.send(arena)
    _spin(pipe, transport.poll)


def plot(axis: Any, rows: Sequence[Row]) -> None:
    """Draw medians over the size of a payload."""
    sizes = [row["size"] / MIB for row in rows]
    for name in rows[0]["rates"]:
        rates = [statistics.median(row["rates"][name]) / 1e9 for row in rows]
        axis.plot(sizes, rates, "o-" if name in PEERS else "x:", label=name)
    axis.set(xscale="log", yscale="log", xlabel="payload, MiB", ylabel="GB/s", title="payloads")
    axis.legend(fontsize=7)

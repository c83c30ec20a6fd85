"""Compare payloads between two processes, by our transports, by plain NIXL and by plain gRPC.

The next payload is sent after the last one has arrived. Each way to send has its own receiving
process, and rounds interleave all ways.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import grpc
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import harness
from benchmarks.servers.processes import Peer, folder
from seqpar.servers.transport.choose import own_name
from seqpar.servers.transport.event_loop import start
from seqpar.servers.transport.one_sided import ArenaTarget, OneSided, available
from seqpar.servers.wire.arena import ALIGNMENT
from seqpar.servers.wire.limits import MAX_MESSAGE_BYTES
from seqpar.servers.wire.payload import CHUNK_BYTES, Incoming, Payload, PayloadTensor, chunks
from seqpar.servers.wire.versions import data_of, joined

Row = dict[str, Any]
Bytes = NDArray[np.uint8]


class Way(NamedTuple):
    """A way to send: a function that sends one payload, and the receiving process, if it spins."""

    send: Callable[[Bytes], None]
    spinning: Peer | None = None


MIB = 2**20
SIZES = [2**16, MIB, 8 * MIB, 64 * MIB]
PEERS = {"nixl": "NIXL alone", "grpc": "gRPC alone"}
BYTES = 128 * MIB  # the least bytes per round
MOST = 64  # payloads per round
_OPTIONS = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
_METHOD = "/bandwidth/Receive"


def measure(rounds: int, begin: Callable[[str], None]) -> list[Row]:
    """Return a row for each size: bytes per second of each way, and ratios of ours to its peer."""
    rows = []
    with ExitStack() as stack:
        ways = {"gRPC alone": partial(streams, False), "grpc": partial(streams, True)}
        if available():
            ways |= {"NIXL alone": bare_nixl, "nixl": one_sided}
        sends = {name: stack.enter_context(way()) for name, way in ways.items()}
        for size in SIZES:
            begin(f"bandwidth at {size / MIB:g} MiB")
            data = memory(size)
            data[:] = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
            rates: dict[str, list[float]] = {name: [] for name in sends}
            for _, name in harness.turns(sends, rounds + 1):
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
    before = time.perf_counter()
    for _ in range(times):
        way.send(data)
    seconds = time.perf_counter() - before
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
    lines = []
    for row in rows:
        for name, ratio in row["of_peer"].items():
            ours, peer = (statistics.median(row["rates"][x]) / 1e9 for x in (name, PEERS[name]))
            of = f"{peer:.2f} ({PEERS[name]})"
            lines.append([f"{row['size'] / MIB:g}", name, f"{ours:.2f}", of, f"{ratio:.3f}"])
    head = ["payload, MiB", "transport", "ours, GB/s", "its peer, GB/s", "ours / peer"]
    return harness.table(head, lines)


@contextmanager
def streams(ours: bool) -> Iterator[Way]:
    """Send a payload as a stream of chunks: as ours does, or bytes that nobody converts."""
    pieces = dict[int, list[bytes]]()
    with folder() as sockets, Peer(_receive_streams, f"unix:{sockets}/s", ours) as peer:
        peer.hear()

        async def open_method() -> Any:
            channel = grpc.aio.insecure_channel(f"unix:{sockets}/s")
            return channel, channel.stream_unary(_METHOD)

        async def send(data: Bytes) -> None:
            if data.size not in pieces:  # a copy, which is not timed
                whole = data.tobytes()
                starts = range(0, data.size, CHUNK_BYTES)
                pieces[data.size] = [whole[i : i + CHUNK_BYTES] for i in starts]
            call = method(metadata=[("size", str(data.size))])
            if ours:
                for chunk in chunks([data]):
                    await call.write(joined(b"", chunk))
            else:
                for chunk in pieces[data.size]:
                    await call.write(chunk)
            await call.done_writing()
            await call

        channel, method = start(open_method()).result()
        yield Way(lambda data: start(send(data)).result())
        start(channel.close()).result()


def _receive_streams(pipe: Any, target: str, ours: bool) -> None:
    async def receive(_: object, context: Any) -> bytes:
        size = int(dict(context.invocation_metadata())["size"])
        incoming = Incoming(Payload([PayloadTensor("data", torch.uint8, (size,))]))
        while (raw := await context.read()) is not grpc.aio.EOF:
            if ours:
                incoming.take(data_of(raw))
        return b""

    async def serve() -> None:
        server = grpc.aio.server(options=_OPTIONS)
        handlers = {"Receive": grpc.stream_unary_rpc_method_handler(receive)}
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("bandwidth", handlers)]
        )
        server.add_insecure_port(target)
        await server.start()
        pipe.send("ready")
        await server.wait_for_termination()

    asyncio.run(serve())


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
    transport = OneSided(f"bench-{own_name()}")
    with Peer(_one_sided_receiver, transport.open("peer")) as peer:
        transport.connect("peer", peer.hear())

        def send(data: Bytes) -> None:
            start(transport.write("peer", [data], 0)).result()

        yield Way(send, peer)
        transport.shutdown()


def _one_sided_receiver(pipe: Any, target: ArenaTarget) -> None:
    async def poll() -> None:
        hear = partial(asyncio.get_running_loop().run_in_executor, None, pipe.recv)
        while True:
            await hear()
            await transport.polling(hear())

    transport = OneSided(f"bench-{own_name()}")
    arena = transport.open("peer")
    transport.connect("peer", target)
    pipe.send(arena)
    asyncio.run(poll())


def plot(axis: Any, rows: Sequence[Row]) -> None:
    sizes = [row["size"] / MIB for row in rows]
    for name in rows[0]["rates"]:
        rates = [statistics.median(row["rates"][name]) / 1e9 for row in rows]
        axis.plot(sizes, rates, "o-" if name in PEERS else "x:", label=name)
    axis.set(xscale="log", yscale="log", xlabel="payload, MiB", ylabel="GB/s", title="payloads")
    axis.legend(fontsize=7)

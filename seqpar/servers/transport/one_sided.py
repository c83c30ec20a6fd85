"""The transport NIXL, which writes payloads and results directly into the memory of the receiver.

**Security.** A connected peer can write into this process, and payloads are not encrypted. UCX, the
library below NIXL, does not authenticate peers. UCX listens on the interfaces that UCX_NET_DEVICES
names, by default on all interfaces. Use NIXL only if you trust the network and all peers as much as
this process.

Each pool and each server has one NIXL *agent*, and one *block* of memory for received data. Each
session has an *arena*, which is a part of the block. A *place* is an offset in an arena. NIXL reads
and writes only registered memory. The block is registered once. A sender registers the payload's
memory for each transfer, because registering takes microseconds, and copying into a registered
buffer would take milliseconds.

A peer can still write to an arena after this process has stopped waiting for the peer. The receiver
therefore copies a payload before it computes the checksum.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from seqpar.servers.transport.listeners import listeners
from seqpar.servers.wire.arena import ALIGNMENT, Arena, placed
from seqpar.servers.wire.payload import Bytes

_log = logging.getLogger("seqpar")
_BLOCK_BYTES = 2**30  # virtual memory; the system provides a page only when it is used
_MAX_ARENA_BYTES = 2**26  # per session
# During a transfer, both agents must be polled. NIXL has a thread for this, but it takes half a
# core in an idle process. Each side therefore polls while it waits: without a pause in the first 2
# ms, and then once per millisecond.
_SPIN_SECONDS, _POLL_SECONDS = 0.002, 0.001
T = TypeVar("T")


class TransportError(RuntimeError):
    """A payload could not be written, or did not arrive."""


class ArenaTarget(NamedTuple):
    """What a peer needs to write into an arena: the agent's metadata, the address and the size."""

    agent: bytes
    address: int
    size: int


def available() -> bool:
    """Return whether NIXL is installed and can be loaded."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    try:
        import nixl  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


def _address(array: Bytes) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


@dataclass
class _Peer:
    start: int  # the offset in this process's block at which the peer's arena begins
    size: int  # the size of this arena in bytes
    agent: str | None = None  # NIXL's name of the peer's agent
    target: ArenaTarget | None = None  # the arena in the peer's process, into which we write


class OneSided:
    """The NIXL agent of a pool or a server. All methods are called in one thread."""

    def __init__(self, name: str) -> None:
        """`name` must be unique among connected agents."""
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        from nixl import nixl_agent, nixl_agent_config

        if os.environ.get("UCX_NET_DEVICES", "all") == "all":
            _log.warning(
                "nixl: UCX_NET_DEVICES is not set, so NIXL listens on all interfaces, and does not "
                "authenticate who connects; set it to one interface, such as eth0 or lo"
            )
        before = listeners()
        self._agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False))
        # NumPy uses huge pages for this block, and torch would not.
        memory = np.empty(_BLOCK_BYTES + ALIGNMENT, np.uint8)
        skipped = -_address(memory) % ALIGNMENT
        self._bytes = memory[skipped : skipped + _BLOCK_BYTES]
        self._start = _address(self._bytes)
        self._registered = self._agent.register_memory([(self._start, _BLOCK_BYTES, 0, "")], "DRAM")
        self.addresses = sorted(listeners() - before)  # the addresses at which NIXL listens
        self._rooms = Arena(_BLOCK_BYTES)
        self._peers: dict[Hashable, _Peer] = {}
        self._stuck: list[object] = []  # keeps the memory of transfers that could not be ended

    def open(self, peer: Hashable) -> ArenaTarget | None:
        """Reserve an arena for a peer, and return the `ArenaTarget` to be sent to the peer.

        Returns None if the block has no space for an arena.
        """
        size = min(_MAX_ARENA_BYTES, (_BLOCK_BYTES - self._rooms.lent) // 4)
        start = self._rooms.take(size) if size else None
        if start is None:
            return None
        self._peers[peer] = _Peer(start, size)
        offer = self._agent.get_partial_agent_metadata(self._registered, inc_conn_info=True)
        return ArenaTarget(offer, self._start + start, size)

    def connect(self, peer: Hashable, target: ArenaTarget) -> None:
        """Connect to a peer's arena, or raise a TransportError if the target is not valid."""
        known = self._peers[peer]
        if not target.size or not 0 < target.address < 2**63 - target.size:
            raise TransportError("nixl: the peer has no arena that could be written to")
        try:
            known.agent = self._agent.add_remote_agent(target.agent).decode()
        except Exception as error:  # NIXL has many types of exceptions
            raise TransportError(f"nixl: the peer's agent is not known: {error}") from None
        known.target = target

    def close(self, peer: Hashable) -> None:
        known = self._peers.pop(peer, None)
        if known is None:
            return
        self._rooms.give(known.start)
        if not any(other.agent == known.agent for other in self._peers.values()):
            with suppress(Exception):  # NIXL forgets the agent even if its connection fails
                self._agent.remove_remote_agent(known.agent)

    async def write(self, peer: Hashable, parts: Sequence[Bytes], place: int) -> None:
        """Write parts, each aligned to 64 bytes, to `place` in a peer's arena.

        The parts must not change during the write. Raises a TransportError if the write fails.
        """
        known = self._peers.get(peer)
        places, total = placed([part.nbytes for part in parts])
        agent, target = (None, None) if known is None else (known.agent, known.target)
        if agent is None or target is None or not 0 <= place <= target.size - total:
            raise TransportError("nixl: the payload would not lie in the peer's arena")
        base = target.address + place
        pairs = [(base + x, part) for x, part in zip(places, parts, strict=True) if part.size]
        if pairs:
            await self._transfer(
                agent,
                [(_address(part), part.size, 0) for _, part in pairs],
                [(to, part.size, 0) for to, part in pairs],
            )

    async def _transfer(
        self, agent: str, local: list[tuple[int, int, int]], remote: list[tuple[int, int, int]]
    ) -> None:
        handle = registered = None
        try:
            # q, k and v can be the same tensor. The set removes duplicates, because NIXL crashes
            # when it deregisters memory that was listed twice.
            registered = self._agent.register_memory(list({(*x, "") for x in local}), "DRAM")
            descriptors = (self._agent.get_xfer_descs(x, "DRAM") for x in (local, remote))
            handle = self._agent.initialize_xfer("WRITE", *descriptors, agent, b"")
            state, start = self._agent.transfer(handle), time.monotonic()
            while state == "PROC":
                await _pause(start)
                state = self._agent.check_xfer_state(handle)
        except Exception as error:
            raise TransportError(f"nixl: {type(error).__name__}") from None
        finally:
            try:
                if handle is not None:
                    self._agent.release_xfer_handle(handle)
                if registered is not None:
                    self._agent.deregister_memory(registered)
            # The transfer could not be ended and can still read the parts, so the parts are kept
            # alive.
            except Exception:
                self._stuck.append((handle, registered, local))
        if state != "DONE":
            raise TransportError("nixl: the transfer failed")

    async def polling(self, waited: Awaitable[T]) -> T:
        """Wait for `waited`, a message that a peer sends after it has written a payload. Until the
        message arrives, let NIXL make progress.
        """
        task, start = asyncio.ensure_future(waited), time.monotonic()
        try:
            while not task.done():
                self._agent.get_new_notifs()
                await _pause(start)
            return await task
        finally:
            task.cancel()

    def read(self, peer: Hashable, sizes: Sequence[int], place: int) -> list[Bytes]:
        """Return copies of the parts that a peer has written to `place` in its arena.

        `sizes` are the sizes of the parts in bytes.
        """
        known = self._peers.get(peer)
        places, total = placed(sizes)
        if known is None or not 0 <= place <= known.size - total:
            raise TransportError("place: the payload does not lie in this peer's arena")
        block = self._bytes[known.start + place : known.start + place + total]
        pairs = zip(places, sizes, strict=True)
        return [block[start : start + size].copy() for start, size in pairs]

    def shutdown(self) -> None:
        for peer in list(self._peers):
            self.close(peer)
        self._agent.deregister_memory(self._registered)


async def _pause(start: float) -> None:
    """Let other coroutines run. If more than 2 ms have passed since `start`, sleep for 1 ms."""
    await asyncio.sleep(0 if time.monotonic() < start + _SPIN_SECONDS else _POLL_SECONDS)

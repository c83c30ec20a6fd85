"""NIXL's transport: one-sided writes into memory that is registered once.

Security: a connected peer may write into this process, and payloads are not encrypted. Use it only
with peers that are trusted as much as this process.

Each end has one NIXL agent and one block of memory. Every peer writes to its own share of this
block. The sender writes from the payload's own memory, which is registered during the transfer: on
a CPU, registering 64 MiB takes 5 µs and copying it 10 ms. The control message of a payload is the
notification of its write. A peer that was given up may still end a write, so both sides copy a
payload before they compare its checksum.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from seqpar.servers.transport.zeromq import ArenaTarget, Sending, Transport, TransportError, joined
from seqpar.servers.wire.arena import ALIGNMENT, Arena, placed
from seqpar.servers.wire.payload import Buffer, Bytes, Frame
from seqpar.servers.wire.protocol import TransportName

# Seconds for which the owner polls every millisecond after a peer announced a write. NIXL's own
# progress thread takes half a core in an idle process. Polling all the time takes two cores for 32
# clients of one server.
_HURRY = 0.2


def available() -> bool:
    """Return whether NIXL is installed and can be loaded."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    try:
        import nixl._api  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


def _address(array: Bytes) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _fits(place: int | None, size: int, arena: int) -> bool:
    return place is not None and 0 <= place <= arena - size


@dataclass
class _Peer:
    start: int  # of the bytes reserved here for its writes
    size: int
    agent: str | None = None
    target: ArenaTarget = field(default_factory=ArenaTarget)  # its arena


@dataclass
class _Flight:
    """The resources of one transfer."""

    arrays: Sequence[Bytes]
    handle: object = None  # NIXL's
    registered: object = None  # the registration of the arrays


class OneSided(Transport):
    """Writes payloads into the peer's arena, on CPUs over shared memory or TCP."""

    name: TransportName = "nixl"

    def __init__(self, name: str, room: int) -> None:
        """`name` is unique among connected agents; all peers write to a block of `room` bytes."""
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        from nixl._api import nixl_agent, nixl_agent_config

        # A progress thread would take half a core while idle; the owner polls instead.
        self._agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False))
        memory = np.empty(room + ALIGNMENT, np.uint8)  # numpy uses huge pages, torch does not
        skipped = -_address(memory) % ALIGNMENT
        self._bytes = memory[skipped : skipped + room]
        self._base = _address(self._bytes)
        self._registered = self._agent.register_memory(
            [(self._base, self._bytes.size, 0, "")], "DRAM"
        )
        self._rooms = Arena(room)
        self._peers: dict[Hashable, _Peer] = {}
        self._sendings: dict[Sending, _Flight] = {}
        self._stuck: list[_Flight] = []
        self._hurry_until = -math.inf

    def open(self, peer: Hashable, arena: int) -> ArenaTarget:
        if peer in self._peers:
            self.close(peer)
        start = self._rooms.take(arena) if arena else None
        if start is None:
            return ArenaTarget()
        self._peers[peer] = _Peer(start, arena)
        self.hurry()  # the first write needs several turns of both sides
        offer = self._agent.get_partial_agent_metadata(self._registered, inc_conn_info=True)
        return ArenaTarget(arena, self._base + start, offer)

    def share(self, most: int) -> int:
        return min(most, (self._rooms.size - self._rooms.lent) // 4)

    def connect(self, peer: Hashable, target: ArenaTarget) -> None:
        known = self._peers.get(peer)
        if known is None or not target.arena or not 0 < target.base < 2**63 - target.arena:
            raise TransportError("nixl: the peer has no arena that could be written to")
        try:
            known.agent = self._agent.add_remote_agent(target.offer).decode()
        except Exception as error:
            raise TransportError(f"nixl: the peer's offer cannot be read: {error}") from None
        known.target = target

    def close(self, peer: Hashable) -> None:
        known = self._peers.pop(peer, None)
        if known is None:
            return
        for sending in [x for x in self._sendings if x.peer == peer]:
            self._end(sending, "the peer has left")
        if not any(other.agent == known.agent for other in self._peers.values()):
            self._forget(known.agent)
        self._rooms.give(known.start)

    def _forget(self, agent: str | None) -> None:
        """Drop an agent's metadata; all peers of this agent must be connected again."""
        if agent is None:
            return
        for peer in self._peers.values():
            if peer.agent == agent:
                peer.agent = None
        with suppress(Exception):  # NIXL forgets the agent even if its connection fails
            self._agent.remove_remote_agent(agent)

    def begin(self, sending: Sending, parts: Sequence[Bytes], place: int | None) -> Sending:
        known = self._peers.get(sending.peer)
        arrays = [np.frombuffer(part, np.uint8) for part in joined(parts)]
        places, total = placed([array.size for array in arrays])
        sending.moving = sending.notifies = True
        if known is None or known.agent is None or not _fits(place, total, known.target.arena):
            self._end(sending, "the peer has no room at that place")
            return sending
        flight = self._sendings[sending] = _Flight(arrays)
        try:
            if total:
                base = known.target.base + (place or 0)
                pairs = [(base + x, part) for x, part in zip(places, arrays, strict=True)]
                remote = [(target, part.size, 0) for target, part in pairs if part.size]
                local = [(_address(part), part.size, 0) for part in arrays if part.size]
                # q, k and v may be one tensor. NIXL crashes when it deregisters a block that is
                # listed twice.
                blocks = list({(*each, "") for each in local})
                flight.registered = self._agent.register_memory(blocks, "DRAM")
                descriptors = (self._agent.get_xfer_descs(x, "DRAM") for x in (local, remote))
                write = "WRITE", *descriptors, known.agent, sending.message
                flight.handle = self._agent.initialize_xfer(*write)
                self._update(sending, self._agent.transfer(flight.handle))
            else:
                self._agent.send_notif(known.agent, sending.message)
                self._end(sending, None)
        except Exception as error:  # NIXL has many exception types
            self._end(sending, f"nixl: {type(error).__name__}")
            self._forget(known.agent)
        return sending

    def progress(self, sending: Sending) -> None:
        if not sending.moving:
            return
        try:
            self._update(sending, self._agent.check_xfer_state(self._sendings[sending].handle))
        except Exception as error:
            self._end(sending, f"nixl: {type(error).__name__}")
        if sending.moving and time.monotonic() > sending.deadline:
            self._end(sending, "it was not written within its deadline")
        # A peer that continues after a stop, or was replaced, needs new metadata and a handshake.
        if sending.error is not None and (known := self._peers.get(sending.peer)) is not None:
            self._forget(known.agent)

    def _update(self, sending: Sending, state: str) -> None:
        if state == "ERR":
            self._end(sending, "nixl: the transfer failed")
        elif state == "DONE":
            self._end(sending, None)

    def _end(self, sending: Sending, error: str | None) -> None:
        """Release the resources of a transfer, whether it has failed or not."""
        sending.moving, sending.error = False, error
        flight = self._sendings.pop(sending, None)
        if flight is None:
            return
        try:
            if flight.handle is not None:
                self._agent.release_xfer_handle(flight.handle)
            if flight.registered is not None:
                self._agent.deregister_memory(flight.registered)
        except Exception:  # it could not be aborted, and may still read the arrays
            self._stuck.append(flight)

    def poll(self) -> list[tuple[Any, bytes]]:
        if not self._peers:
            return []
        found = []
        for agent, messages in self._agent.get_new_notifs().items():
            peers = [peer for peer, known in self._peers.items() if known.agent == agent]
            found += [(peers[-1], message) for message in messages if peers]
        if not found:
            os.sched_yield()  # the owner may spin, and the writer may need this core
        return found

    def hurry(self) -> None:
        self._hurry_until = time.monotonic() + _HURRY

    def patience(self) -> int:
        return 1 if self._peers and time.monotonic() < self._hurry_until else 1000

    def read(
        self, peer: Hashable, frames: Sequence[Frame], sizes: Sequence[int], place: int | None
    ) -> Sequence[Buffer]:
        known = self._peers.get(peer)
        places, total = placed(sizes)
        if known is None or place is None or not _fits(place, total, known.size):
            raise TransportError("place: it is not in this peer's arena")
        block = self._bytes[known.start + place : known.start + place + total]
        return [block[start : start + size] for start, size in zip(places, sizes, strict=True)]

    def shutdown(self) -> None:
        for peer in list(self._peers):
            self.close(peer)
        self._agent.deregister_memory(self._registered)

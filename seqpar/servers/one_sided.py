"""NIXL's transport: one-sided writes into memory that is registered once.

An end has one agent and two blocks of memory: a peer's writes arrive in its share of the first, and
what is sent is copied to the second, from where it is written. A peer that is to be reached may
write into this process, and what is written is not encrypted: this is for peers that are trusted as
the own process is. Checksums find what a peer that was given up writes late.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from seqpar.servers.arena import ALIGNMENT, Arena, placed
from seqpar.servers.protocol import TransportName
from seqpar.servers.transport import Reach, Sending, Transport, TransportError

_IDLE = 1.0  # seconds without a transfer after which peers' progress is polled for less often


def available() -> bool:
    """Return whether NIXL is installed and can be loaded."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    try:
        import nixl._api  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


def _fits(place: int | None, size: int, arena: int) -> bool:
    return place is not None and 0 <= place <= arena - size


class _Peer:
    """What an agent knows of a peer: its name and arena, and its room here."""

    def __init__(self, start: int, size: int) -> None:
        self.start, self.size = start, size
        self.agent: str | None = None
        self.reach = Reach()


class OneSided(Transport):
    """Writes payloads into the peer's arena, on CPUs over shared memory or TCP.

    Args:
        name: of the agent: no two agents that meet may have the same.
        incoming, outgoing: bytes of the blocks that peers write to, and that is sent from.
    """

    name: TransportName = "nixl"

    def __init__(self, name: str, incoming: int, outgoing: int) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        from nixl._api import nixl_agent, nixl_agent_config

        # A progress thread would take half a core while nothing happens; the owner polls instead.
        self._agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False))
        self._memory = torch.empty(incoming + outgoing + ALIGNMENT, dtype=torch.uint8)
        skipped = -self._memory.data_ptr() % ALIGNMENT
        self._bytes = self._memory.numpy()[skipped : skipped + incoming + outgoing]
        self._base = self._memory.data_ptr() + skipped
        self._registered = self._agent.register_memory(
            [(self._base, self._bytes.size, 0, "")], "DRAM"
        )
        self._rooms, self._staging, self._staged = Arena(incoming), Arena(outgoing), incoming
        self._peers: dict[Hashable, _Peer] = {}
        self._sendings: set[Sending] = set()
        self._used = -math.inf

    def open(self, peer: Hashable, arena: int) -> Reach:
        if peer in self._peers:
            self.close(peer)
        start = self._rooms.take(arena) if arena else None
        if start is None:
            return Reach()
        self._peers[peer] = _Peer(start, arena)
        self._used = time.monotonic()  # the first write needs several turns of both sides
        return Reach(arena, self._base + start, self._agent.get_agent_metadata())

    def connect(self, peer: Hashable, reach: Reach) -> None:
        known = self._peers.get(peer)
        if known is None or not reach.arena or not 0 < reach.base < 2**63 - reach.arena:
            raise TransportError("nixl: the peer has no arena that could be written to")
        try:
            known.agent = self._agent.add_remote_agent(reach.offer).decode()
        except Exception as error:
            raise TransportError(f"nixl: the peer's offer cannot be read: {error}") from None
        known.reach = reach

    def close(self, peer: Hashable) -> None:
        known = self._peers.pop(peer, None)
        if known is None:
            return
        for sending in [x for x in self._sendings if x.peer == peer]:
            self._fail(sending, "the peer has left")
        if not any(other.agent == known.agent for other in self._peers.values()):
            self._forget(known.agent)
        self._rooms.give(known.start)

    def _forget(self, agent: str | None) -> None:
        """Drop an agent's metadata: peers that it serves must be connected again."""
        if agent is None:
            return
        for peer in self._peers.values():
            if peer.agent == agent:
                peer.agent = None
        with suppress(Exception):  # it is forgotten in any case, whatever its connection says
            self._agent.remove_remote_agent(agent)

    def begin(
        self,
        peer: Hashable,
        message: bytes,
        parts: Sequence[Any],
        place: int | None,
        deadline: float,
    ) -> Sending:
        known = self._peers.get(peer)
        arrays = [np.frombuffer(part, np.uint8) for part in parts]
        places, total = placed([array.size for array in arrays])
        sending = Sending(peer, message, [], deadline, moving=True)
        start = self._staging.take(total)
        if known is None or known.agent is None or not _fits(place, total, known.reach.arena):
            reason = "the peer has no room at that place"
        elif start is None:
            reason = "there is no room to send from"
        else:
            reason = ""
        if start is None or reason:
            if start is not None:
                self._staging.give(start)
            self._fail(sending, reason)
            return sending
        for array, offset in zip(arrays, places, strict=True):
            begin = self._staged + start + offset
            self._bytes[begin : begin + array.size] = array
        self._sendings.add(sending)
        sending.handle = [start, None]
        self._used = time.monotonic()
        if not total:
            sending.moving = False
            self._release(sending)
            return sending
        assert known is not None and place is not None
        try:
            local = [(self._base + self._staged + start, total, 0)]
            remote = [(known.reach.base + place, total, 0)]
            descriptors = (self._agent.get_xfer_descs(x, "DRAM") for x in (local, remote))
            handle = self._agent.initialize_xfer("WRITE", *descriptors, known.agent)
            sending.handle[1] = handle
            self._update(sending, self._agent.transfer(handle))
        except Exception as error:  # of many kinds, NIXL's own
            self._fail(sending, f"nixl: {type(error).__name__}")
            self._forget(known.agent)
        return sending

    def progress(self, sending: Sending) -> None:
        if not sending.moving:
            return
        self._used = time.monotonic()
        try:
            self._update(sending, self._agent.check_xfer_state(sending.handle[1]))
        except Exception as error:
            self._fail(sending, f"nixl: {type(error).__name__}")
        if sending.moving and time.monotonic() > sending.deadline:
            self._fail(sending, "it was not written within its deadline")
        if sending.error is not None and (known := self._peers.get(sending.peer)) is not None:
            self._forget(known.agent)

    def _update(self, sending: Sending, state: str) -> None:
        if state == "ERR":
            self._fail(sending, "nixl: the transfer failed")
        elif state == "DONE":
            sending.moving = False
            self._release(sending)

    def _fail(self, sending: Sending, reason: str) -> None:
        sending.moving, sending.error = False, reason
        self._release(sending)

    def _release(self, sending: Sending) -> None:
        """Give back what a transfer holds, in all cases."""
        if sending not in self._sendings:
            return
        self._sendings.discard(sending)
        start, handle = sending.handle
        if handle is not None:
            with suppress(Exception):  # a transfer that is aborted is released by the agent later
                self._agent.release_xfer_handle(handle)
        self._staging.give(start)

    def poll(self) -> None:
        if self._peers:
            self._agent.get_new_notifs()

    def patience(self) -> int:
        """Return after how many milliseconds peers' writes may need this side."""
        if not self._peers:
            return 1000
        return 1 if time.monotonic() - self._used < _IDLE else 20

    def read(
        self, peer: Hashable, frames: Sequence[Any], sizes: Sequence[int], place: int | None
    ) -> Sequence[Any]:
        self._used = time.monotonic()
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

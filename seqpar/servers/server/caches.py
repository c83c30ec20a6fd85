"""A server's caches of keys and values; each belongs to one client's lease.

A cache exists until its client frees it or its client's lease ends; the server never evicts rows. A
step whose rows do not fit is refused. A step whose cache is missing, or differs from the one that
the step continues, gets a CacheLost error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.core.arguments import MAX_DOCUMENT_TOKENS
from seqpar.servers.transport.peers import Peer, fits, room
from seqpar.servers.wire.header import DTYPES, form_of
from seqpar.servers.wire.pages import Pages, RowShape, Seen
from seqpar.servers.wire.payload import Buffer, RequestError
from seqpar.servers.wire.protocol import StepRequest
from seqpar.softmax.compute.call_options import CallOptions

_OVERHEAD = 2**12  # bytes of a cache in addition to its pages


class CacheLost(RequestError):
    """The cache that a step continues is missing or is a different one."""


@dataclass(eq=False)
class ClientCache:
    """Keys and values of one client."""

    pages: Pages
    length: int = 0  # rows after all accepted steps are computed
    writes: int = 0  # accepted steps
    done: int = 0  # computed steps


@dataclass(eq=False)
class CacheStep:
    """An accepted step, which is computed after all earlier steps of its client."""

    cache: ClientCache
    number: int  # of the step in its cache, from 0
    start: int  # the cache row of the first new key
    length: int  # cache rows after the step
    q: Tensor
    k: Tensor  # the new keys
    v: Tensor
    seen: Seen
    options: CallOptions

    @property
    def kind(self) -> Hashable:
        """A key that is equal for steps that take about the same time."""
        size = self.length.bit_length()
        return "step", *self.cache.pages.shape, self.q.shape[2:], self.options, size

    @torch.no_grad()
    def compute(self) -> list[Tensor]:
        """Write the new rows, and return out and lse.

        If an earlier step was not computed, raise a CacheLost: rows that were never written could
        hold another client's data. Computing the last step again changes nothing.
        """
        pages = self.cache.pages
        if self.cache.done not in (self.number, self.number + 1):
            raise CacheLost("cache: an earlier step was not computed")
        pages.write(self.start, self.k, self.v)
        q = self.q.to(pages.device)
        found = pages.attend(q, self.length, self.seen, self.options)
        self.cache.done = self.number + 1
        return [x.contiguous() for x in found]


class Caches:
    """The caches of a server, by client and number. One thread makes all calls."""

    def __init__(self, most: int, device: torch.device, backend: str) -> None:
        """`most` is the most bytes that all caches may take."""
        self._most, self._device, self._backend = most, device, backend
        self._caches: dict[Peer, dict[int, ClientCache]] = {}
        # Totals are updated with each change: a client may have a million small caches.
        self._by_key: dict[str, int] = defaultdict(int)
        self.nbytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._caches.values()))

    def room_of(self, key: str, shared: bool) -> int:
        """Return how many more bytes a key's caches may take; `shared` is as in `admit`."""
        return room(self._by_key.get(key, 0), self.nbytes, self._most, shared)

    def _count(self, key: str, more: int) -> None:
        self.nbytes += more
        self._by_key[key] += more
        if not self._by_key[key]:
            del self._by_key[key]

    def admit(
        self,
        client: Peer,
        step: StepRequest,
        buffers: Sequence[Buffer],
        shared: bool = False,
        checked: bool = False,
    ) -> CacheStep:
        """Accept a step, whose header was checked, and reserve memory for its rows.

        `shared` is whether several keys share the memory; `checked` is whether the payload was
        already compared with its checksum. An error (CacheLost, or a RequestError that names the
        fault) leaves all caches as they were.
        """
        payload = form_of(step).request
        length = step.start + step.k_rows
        last = max(length, step.offset + step.q_rows) + max(0, -step.offset)
        if last > MAX_DOCUMENT_TOKENS:
            reason = f"positions must be at most {MAX_DOCUMENT_TOKENS}"
            raise RequestError(f"start, offset: {reason}, got {step.start} and {step.offset}")
        dims = step.batch, step.kv_heads, step.dim, step.value_dim
        shape = RowShape(DTYPES[step.dtype], *dims)
        own = self._caches.get(client, {})
        cache = own.get(step.cache)
        if cache is None:
            if step.start or step.writes:
                raise CacheLost("cache: there is none of this number")
            cache = ClientCache(Pages(shape, self._device))
        elif cache.writes != step.writes or cache.length < step.start:
            raise CacheLost("cache: it is another one")
        elif cache.pages.shape != shape:
            raise RequestError("cache: its rows have other heads, head dims, batch or dtype")
        if not checked:
            payload.check(buffers, step.checksum)
        q, k, v = payload.tensors(buffers)
        more = max(0, shape.nbytes(length) - cache.pages.nbytes)
        if step.cache not in own:
            more += _OVERHEAD
        held = self._by_key.get(client.key, 0)
        if more and not fits(more, held, self.nbytes, self._most, shared):
            free = self.room_of(client.key, shared)
            raise RequestError(f"cache: {more} bytes more are not free, {free} are")
        cache.pages.reserve(length)
        self._count(client.key, more)
        self._caches.setdefault(client, own)[step.cache] = cache
        cache.length, cache.writes = length, cache.writes + 1
        options = CallOptions(step.scale, step.softcap, self._backend, deterministic=True)
        seen = Seen(step.offset, step.left, step.right)
        return CacheStep(cache, step.writes, step.start, length, q, k, v, seen, options)

    def free(self, client: Peer, number: int) -> None:
        """Free the client's cache with this number, if it exists."""
        cache = self._caches.get(client, {}).pop(number, None)
        if cache is not None:
            self._count(client.key, -(cache.pages.nbytes + _OVERHEAD))

    def end(self, client: Peer) -> None:
        """Free all caches of a client."""
        for number in list(self._caches.get(client, ())):
            self.free(client, number)
        self._caches.pop(client, None)

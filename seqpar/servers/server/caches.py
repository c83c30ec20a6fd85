"""The caches of keys and values that a server stores for its clients.

A cache belongs to one client, and exists until the client frees it or the client's session ends. A
*step* appends rows to a cache, and computes attention over the rows of the cache. The server never
deletes rows to make space. A step whose rows do not fit into the memory for caches is refused. If
the cache of a step is not on the server, the step fails with a CacheLost.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.core.arguments import MAX_DOCUMENT_TOKENS
from seqpar.core.ranges import UNLIMITED
from seqpar.servers.server.account import Account, Client
from seqpar.servers.wire.header import DTYPES, form_of
from seqpar.servers.wire.messages import Step, Task
from seqpar.servers.wire.pages import Pages, RowShape, Seen
from seqpar.servers.wire.payload import Buffer, RequestError
from seqpar.softmax.compute.call_options import CallOptions

_OVERHEAD = 2**12  # bytes that a cache takes in addition to its pages


class CacheLost(RequestError):
    """The server does not have the cache of a step, or has it in a different state."""


@dataclass(eq=False)
class ClientCache:
    pages: Pages
    length: int = 0  # the number of rows after all accepted steps
    writes: int = 0  # the number of accepted steps
    done: int = 0  # the number of computed steps


@dataclass(eq=False)
class CacheStep:
    """An accepted step, which is computed after all earlier steps of its client."""

    cache: ClientCache
    number: int  # the number of earlier steps of the cache
    start: int  # the row of the cache at which the new keys begin
    length: int  # the number of rows that the cache has after the step
    q: Tensor
    k: Tensor  # the new keys
    v: Tensor
    seen: Seen
    options: CallOptions

    @property
    def kind(self) -> Hashable:
        """A key that is equal for two steps that take about the same time."""
        size = self.length.bit_length()
        return "step", *self.cache.pages.shape, self.q.shape[2:], self.options, size

    @torch.no_grad()
    def compute(self) -> list[Tensor]:
        """Compute this decoding step: write the new rows into the cache, and return out and lse.

        The last step can be computed again with the same result. If an earlier step was not
        computed, `compute` raises a CacheLost, because memory that was never written can contain
        data of other clients.
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
    """The caches of a server, by client and number. All methods are called in one thread."""

    def __init__(self, most: int, device: torch.device, backend: str) -> None:
        """`most` is the largest number of bytes of all caches together."""
        self.account = Account(most)
        self._device, self._backend = device, backend
        self._caches: dict[Client, dict[int, ClientCache]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._caches.values()))

    def admit(self, client: Client, task: Task, step: Step, buffers: Sequence[Buffer]) -> CacheStep:
        """Accept a decoding step whose header and payload were checked, and reserve memory for its
        rows.

        If an error is raised, no cache has changed.

        Raises:
            CacheLost: the server does not have the cache that the step continues.
            RequestError: the step is wrong, or its rows do not fit. The text has the reason.
        """
        length = step.start + task.k_rows
        last = max(length, step.offset + task.q_rows) + max(0, -step.offset)
        if last > MAX_DOCUMENT_TOKENS:
            reason = f"positions must be at most {MAX_DOCUMENT_TOKENS}"
            raise RequestError(f"start, offset: {reason}, got {step.start} and {step.offset}")
        if max(step.left, step.right) > UNLIMITED:
            raise RequestError(f"left, right: at most {UNLIMITED} rows, got {step[-2:]}")
        dims = task.batch, task.kv_heads, task.dim, task.value_dim
        shape = RowShape(DTYPES[task.dtype], *dims)
        own = self._caches.get(client, {})
        cache = own.get(step.cache)
        if cache is None:
            if step.start or step.writes:
                raise CacheLost("cache: the server has none with this number")
            cache = ClientCache(Pages(shape, self._device))
        elif cache.writes != step.writes or cache.length < step.start:
            raise CacheLost("cache: the server has a different one with this number")
        elif cache.pages.shape != shape:
            raise RequestError("cache: its rows have a different dtype, batch, heads or head dim")
        q, k, v = form_of(task).request.tensors(buffers)
        more = max(0, shape.nbytes(length) - cache.pages.nbytes)
        if step.cache not in own:
            more += _OVERHEAD
        if more and not self.account.fits(client.name, more):
            free = self.account.room_of(client.name)
            raise RequestError(f"cache: the step needs {more} more bytes, and {free} are free")
        cache.pages.reserve(length)
        self.account.count(client.name, more)
        self._caches.setdefault(client, own)[step.cache] = cache
        cache.length, cache.writes = length, cache.writes + 1
        options = CallOptions(task.scale, task.softcap, self._backend, deterministic=True)
        seen = Seen(step.offset, step.left, step.right)
        return CacheStep(cache, step.writes, step.start, length, q, k, v, seen, options)

    def free(self, client: Client, number: int) -> None:
        cache = self._caches.get(client, {}).pop(number, None)
        if cache is not None:
            self.account.count(client.name, -(cache.pages.nbytes + _OVERHEAD))

    def end(self, client: Client) -> None:
        for number in list(self._caches.get(client, ())):
            self.free(client, number)
        self._caches.pop(client, None)

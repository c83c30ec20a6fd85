"""Rows of a cache that one server holds, of which home keeps a copy."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from torch import Tensor

from seqpar.servers.cache.recomputed_rows import Rebuilt
from seqpar.servers.pool.cache_requests import CacheRequests
from seqpar.servers.pool.connection import Answer, CachePlace
from seqpar.servers.wire.codec import pack_step
from seqpar.servers.wire.errors import ServersError, StepLostError
from seqpar.servers.wire.pages import Pages, Seen
from seqpar.servers.wire.request import received
from seqpar.softmax.compute.call_options import CallOptions

_AT_ONCE = 2**25  # bytes of rows that are sent in one message at most
_AGAIN = 5.0  # seconds after which a server that has lost a cache may be given another one
_LOOK = 0.02  # seconds after which servers are tried again, where home does not compute
_numbers = count(1)  # of the caches of this process's servers


class Query(NamedTuple):
    """What is asked of rows: queries (B, T, Hq, D), what they see, and how scores are made."""

    q: Tensor
    seen: Seen
    options: CallOptions


class Held(NamedTuple):
    """What a server holds.

    Attributes:
        place: where.
        number: of the cache there.
        writes: how many steps that took.
        rows: the first rows, which are as home has them.
    """

    place: CachePlace
    number: int
    writes: int = 0
    rows: int = 0


class BegunStep(NamedTuple):
    """What a server was asked, which then has rows up to `stop`."""

    held: Held
    stop: int
    answer: Answer


@dataclass(eq=False)
class SegmentServers:
    """The servers of a pool, as all segments of a cache see them.

    Attributes:
        steps: of the pool.
        placed: where there are caches, by number.
        avoided: until when servers get no other one, by address.
        closed: whether the cache was closed, and servers hold nothing for it any more.
    """

    steps: CacheRequests
    placed: dict[int, CachePlace] = field(default_factory=dict)
    avoided: dict[str, float] = field(default_factory=dict)
    closed: bool = False

    def hold(self, nbytes: int) -> Held | None:
        """Return where so many bytes go, of which there is nothing yet; None if there is no room.

        That is the server with the most room.
        """
        if self.closed:
            if not self.steps.has_home:
                raise ServersError("the cache was closed before a step had its result")
            return None
        now = time.monotonic()
        place = self.steps.place(nbytes, {x for x, end in self.avoided.items() if end > now})
        if place is None and not self.steps.has_home:
            place = self.steps.place(nbytes, ())  # there is nobody else
        if place is None:
            return None
        held = Held(place, next(_numbers))
        self.placed[held.number] = place
        return held

    def forget(self, number: int) -> None:
        """Free what a server holds under a number, if it still does."""
        if (place := self.placed.pop(number, None)) is not None:
            self.steps.forget(place, number)

    def forget_all(self) -> None:
        """Free all, and hold nothing any more."""
        self.closed = True
        for number in list(self.placed):
            self.forget(number)

    def avoid(self, place: CachePlace) -> None:
        """Give a server no cache for a while."""
        self.avoided[place.address] = time.monotonic() + _AGAIN


class Segment:
    """Consecutive rows of a layer's keys and values.

    `write`, or `truncate`, says what they are; `begin` and `finish` ask for attention over them.
    What a server holds counts as lost from when it is asked until it has answered, so whatever
    happens meanwhile, it is never taken for what it is not.

    Attributes:
        length: how many rows there are.
    """

    def __init__(self, servers: SegmentServers, home: Pages | Rebuilt) -> None:
        """`home` is what they are read from where a server lacks them."""
        self.length = 0
        self._servers, self._home = servers, home
        self._held: Held | None = None

    @property
    def held(self) -> tuple[str, int] | None:
        """The address of the server that holds it, and how many bytes that has, if one does."""
        if self._held is None:
            return None
        return self._held.place.address, self._home.shape.nbytes(self._held.rows)

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """Put rows (B, rows, Hkv, D and Dv) behind the first `start` ones, in place of others."""
        stop = start + k.shape[1]
        self._home.reserve(stop)
        self.truncate(start)
        self._home.write(start, k, v)
        self.length = stop

    def truncate(self, length: int) -> None:
        """Drop all rows but the first so many."""
        self.length = min(self.length, length)
        if self._held is not None and self._held.rows > length:
            self._held = self._held._replace(rows=length)

    @property
    def lacks(self) -> bool:
        """Whether no server has all rows, as far as steps have said."""
        return self.length > (0 if self._held is None else self._held.rows)

    def forget(self) -> None:
        """Let a server that holds it free it."""
        if self._held is not None:
            self._servers.forget(self._held.number)
            self._held = None

    def drop(self, begun: BegunStep) -> None:
        """Let nobody wait for what was begun; the server's rows are no longer used."""
        begun.answer.cancel()  # first: what is not sent yet need not be
        self._servers.forget(begun.held.number)

    def begin(self, query: Query) -> BegunStep | None:
        """Ask the server that holds it, and send the rows that it lacks, if these are few."""
        held = self._held
        if held is None or self.length - held.rows > self._rows_at_once(held.place):
            return None
        return self._ask(held, self.length, query)

    def finish(self, query: Query, begun: BegunStep | None) -> tuple[Tensor, ...]:
        """Return out and lse, in fp32 (fp64 for fp64): a server's if there is one, else home's.

        Where the rows were lost, they are sent again first, to any server.
        """
        result = self._result(query, begun)
        self._home.settle()
        return result

    def _result(self, query: Query, begun: BegunStep | None) -> tuple[Tensor, ...]:
        start, reason = time.monotonic(), "no server has room for a cache"
        if begun is not None:
            try:
                return self._answer(begun)
            except StepLostError as error:
                reason = str(error)
        steps = self._servers.steps
        while True:
            held = self._held or self._servers.hold(self._home.nbytes)
            if held is not None:
                try:
                    return self._fill(held, query)
                except StepLostError as error:
                    reason = str(error)
            waited = time.monotonic() - start
            if steps.has_home and (held is None or waited > steps.deadlines.hedge):
                return self._compute(query)
            if waited > steps.deadlines.give_up:
                raise ServersError(f"a step has no result after {waited:.0f} s: {reason}")
            time.sleep(0.0 if steps.has_home else _LOOK)

    def _fill(self, held: Held, query: Query) -> tuple[Tensor, ...]:
        """Send all rows that a server lacks, several times if they are many, and ask it."""
        nothing = query._replace(q=query.q[:, :0])
        most = self._rows_at_once(held.place)
        while self.length - held.rows > most:
            self._answer(self._ask(held, held.rows + most, nothing))
            assert self._held is not None
            held = self._held
        return self._answer(self._ask(held, self.length, query))

    def _ask(self, held: Held, stop: int, query: Query) -> BegunStep:
        """Ask a server, and send the rows that it lacks up to `stop`."""
        self._held, q = None, query.q
        try:
            operands = q, *self._home.read(held.rows, stop)
            packed = pack_step(*held[1:], operands, query.seen, query.options)
            steps, cost = self._servers.steps, self._cost(q)
            return BegunStep(held, stop, steps.submit(held.place, packed, q.device, cost))
        except BaseException:
            self._servers.forget(held.number)
            raise

    def _answer(self, begun: BegunStep) -> tuple[Tensor, ...]:
        """Return what a server answers, which then holds what it was sent."""
        held = begun.held
        try:
            result = received(begun.answer)
        except BaseException as error:
            self._servers.forget(held.number)
            if isinstance(error, StepLostError) and error.blame:
                self._servers.avoid(held.place)
            raise
        self._held = held._replace(writes=held.writes + 1, rows=begun.stop)
        return result

    def _compute(self, query: Query) -> tuple[Tensor, ...]:
        """Compute it at home."""
        if query.q.numel():
            self._servers.steps.count_at_home(self._cost(query.q))
        return self._home.attend(query.q, self.length, query.seen, query.options)

    def _cost(self, q: Tensor) -> int:
        """Return the work of queries, counted as that of tasks."""
        shape = self._home.shape
        return q.shape[:3].numel() * self.length * (shape.dim + shape.value_dim)

    def _rows_at_once(self, place: CachePlace) -> int:
        """Return how many rows a message to a server may have."""
        shape, most = self._home.shape, min(place.bytes // 2, _AT_ONCE)
        return max(1, min(place.tokens // shape.batch, most // shape.row_bytes))

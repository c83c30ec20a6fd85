"""Ulysses attention: tokens are exchanged for heads.

Jacobs et al., "DeepSpeed-Ulysses" (2023), section 3. An all-to-all gives each rank all tokens of some of the heads; it
attends over the whole packed batch; a second all-to-all brings the output home. Query heads go to ranks as evenly as they
divide, at most ⌈Hq/P⌉ each; a KV head goes to every rank that has one of its query heads. A rank's heads are computed in
groups (`heads.py`), so that the exchanges of one group hide under the compute of another.

On a mesh (USP) heads are exchanged within rows of `inner` ranks, and what such a rank then holds, some heads of all its row's
tokens, goes to another strategy between the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.attend import accumulator_dtype
from seqpar.comm import Comm, Message, Part
from seqpar.geometry import Geometry, as_int
from seqpar.strategies.base import Attention, Strategy
from seqpar.strategies.call import Call
from seqpar.strategies.heads import HeadGroup, Heads, divide_heads
from seqpar.strategies.ring import Ring


@dataclass(frozen=True)
class Ulysses(Strategy):
    name = "ulysses"
    head_groups: int = 2  # into how many groups a rank's heads are cut, if there are so many
    inner: int = 0  # ranks among which heads are exchanged; 0: all
    outer: Strategy = field(default_factory=Ring)  # between the rows

    def __post_init__(self) -> None:
        as_int("head_groups", self.head_groups, 1)

    def joined(self, ranks: int) -> int:
        return self.inner or ranks

    def heads(self, ranks: int, q_heads: int, kv_heads: int) -> Heads:
        inner = self.joined(ranks)  # with several rows KV heads are not divided: the outer strategy would send them twice
        return divide_heads(inner, q_heads, kv_heads, self.head_groups, whole_kv=inner < ranks)

    def forward(self, comm: Comm, call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        row = Row(self, comm, call, q.shape[2])
        rows = q.shape[1], q.shape[0], q.shape[2]
        out = q.new_empty((*rows, v.shape[3]))
        lse = q.new_full((*rows, 1), torch.nan, dtype=accumulator_dtype(q.dtype))
        homes = [out] if call.sinks is None and not call.return_lse else [out, lse]
        residuals: list[Tensor] = []
        leaving = None
        for number, (q_heads, *kv) in enumerate(row.arrivals([q], [k, v])):
            mine = row.mine(number)
            if mine.first:
                kv_heads = kv
            operands = [q_heads, *(x[:, :, : mine.kv_count] for x in kv_heads)]
            out_heads, lse_heads, _ = self.outer.forward(row.outer, row.call(mine), *operands)
            residuals += [q_heads, out_heads, lse_heads, *(kv if mine.first else [])]
            heads = [group.q for group in row.heads.group(number)]
            results = zip(homes, [out_heads, lse_heads[..., None]], strict=False)
            before, leaving = leaving, Flight(row.comm, number, [row.queries.to_tokens(x, heads, home) for home, x in results])
            if before is not None:
                before.wait()
        assert leaving is not None
        leaving.wait()
        return out.transpose(0, 1), lse[..., 0].transpose(0, 1), residuals

    def backward(
        self, comm: Comm, call: Call, dout: Tensor, dlse: Tensor | None, residuals: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        row = Row(self, comm, call, dout.shape[2])
        kept = iter(residuals)
        q, k, v = residuals[0], *residuals[3:5]
        exact = accumulator_dtype(q.dtype)
        kv_dtype = exact if row.heads.shared else q.dtype  # a gradient with one contributor is already complete
        rows, keys = (dout.shape[1], dout.shape[0], dout.shape[2]), (row.keys.tokens, dout.shape[0], call.kv_heads)
        dq = q.new_empty((*rows, q.shape[3]))
        dk, dv = (x.new_zeros((*keys, x.shape[3]), dtype=kv_dtype) for x in (k, v))
        dlse = call.shared_dlse(dlse, dout)
        upstream = [dout] if dlse is None else [dout, dlse[..., None]]
        leaving = None
        sums: list[Tensor] = []  # dk and dv of KV heads that the next group shares
        arrivals = row.arrivals(upstream, [])
        for number in range(row.heads.groups):  # `enumerate` would hold what it has given
            dout_heads, *dlse_heads = next(arrivals)
            mine, groups = row.mine(number), row.heads.group(number)
            q, out, lse = next(kept), next(kept), next(kept)
            if mine.first:
                k, v = next(kept), next(kept)
            operands = [q, *(x[:, :, : mine.kv_count] for x in (k, v)), out, lse]
            dlse_group = dlse_heads[0][..., 0] if dlse_heads else None
            dq_heads, *dkv = self.outer.backward(row.outer, row.call(mine), dout_heads, dlse_group, operands)
            if sums:
                dkv = [total.add_(x) for total, x in zip(sums, dkv, strict=True)]
            sums = [] if mine.last else dkv
            dq_heads = dq_heads.to(dq.dtype)
            complete = [x[:, :, : mine.leaving_kv.stop - mine.leaving_kv.start].to(kv_dtype) for x in dkv]
            del dout_heads, dkv
            transfers = [row.queries.to_tokens(dq_heads, [group.q for group in groups], dq)]
            transfers += [
                row.keys.to_tokens(x, [group.leaving_kv for group in groups], home, add=True)
                for home, x in zip((dk, dv), complete, strict=True)
            ]
            del dq_heads, complete  # only what is sent is held while the next group is computed
            before, leaving = leaving, Flight(row.comm, number, transfers)
            if before is not None:
                before.wait()
        assert leaving is not None
        leaving.wait()
        return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)

    def areas(self, call: Call, ranks: int, rank: int, heads: int) -> list[int]:
        size = self.joined(ranks)
        groups = self.heads(ranks, heads, call.kv_heads).of_rank(rank % size)
        inner = replace(call, layout=call.layout.joined(size), kv_layout=call.kv_layout.joined(size))
        counts = (group.q.stop - group.q.start for group in groups)
        return [area for n in counts for area in self.outer.areas(inner, ranks // size, rank // size, n)]

    def empty_residuals(self, comm: Comm, q: Tensor, k: Tensor, v: Tensor, tokens: int, kv_tokens: int) -> list[Tensor]:
        size, batch = self.joined(comm.size), q.shape[0]
        heads = self.heads(comm.size, int(q.shape[2]), int(k.shape[2]))
        residuals = []
        for group in heads.of_rank(comm.rank % size):
            rows, keys = (batch, tokens, group.q.stop - group.q.start), (batch, kv_tokens, group.kv_count)
            residuals += [q.new_empty((*rows, q.shape[3])), q.new_empty((*rows, v.shape[3]))]
            residuals += [q.new_empty(rows, dtype=accumulator_dtype(q.dtype))]
            residuals += [x.new_empty((*keys, x.shape[3])) for x in (k, v) if group.first]
        return residuals


class Row:
    """The ranks among which heads are exchanged, and those between rows, as one of them sees them."""

    def __init__(self, strategy: Ulysses, comm: Comm, call: Call, q_heads: int) -> None:
        size = strategy.joined(comm.size)
        index = comm.rank % size
        ranks = range(comm.rank - index, comm.rank - index + size)
        self.comm = Part(comm, ranks, "heads")
        self.outer = Part(comm, range(index, comm.size, size), strategy.outer.name)
        self.heads = strategy.heads(comm.size, q_heads, call.kv_heads)
        self.queries, self.keys = (Tokens(self.comm, layout, ranks) for layout in (call.layout, call.kv_layout))
        layout, kv_layout = call.layout.joined(size), call.kv_layout.joined(size)
        self._call = replace(call, rank=self.outer.rank, layout=layout, kv_layout=kv_layout)

    def mine(self, number: int) -> HeadGroup:
        return self.heads.group(number)[self.comm.rank]

    def call(self, group: HeadGroup) -> Call:
        """What the outer strategy works from."""
        sinks = None if self._call.sinks is None else self._call.sinks[group.q]
        return replace(self._call, kv_heads=group.kv_count, sinks=sinks)

    def arrivals(self, of_queries: list[Tensor], of_keys: list[Tensor]) -> Iterator[list[Tensor]]:
        """This rank's heads of these tensors, group by group; the next group is under way while one is computed."""

        def post(number: int) -> Flight:
            groups = self.heads.group(number)
            transfers = [self.queries.to_heads(x, [group.q for group in groups]) for x in of_queries]
            transfers += [self.keys.to_heads(x, [group.arriving_kv for group in groups]) for x in of_keys]
            return Flight(self.comm, number, transfers)

        arriving = post(0)
        for number in range(1, self.heads.groups):
            before, arriving = arriving, post(number)
            yield before.wait()
        yield arriving.wait()


class Transfer(NamedTuple):
    """Messages, and what makes a tensor of what has arrived."""

    sends: list[Message]
    recvs: list[Message]
    finish: Callable[[], Tensor]


class Flight:
    """Several transfers in one exchange."""

    def __init__(self, comm: Comm, step: int, transfers: list[Transfer]) -> None:
        self._finish = [transfer.finish for transfer in transfers]
        sends, recvs = (chain.from_iterable(part) for part in list(zip(*transfers, strict=True))[:2])
        self._pending = comm.exchange(sends, recvs, step)

    def wait(self) -> list[Tensor]:
        self._pending.wait()
        finish, self._finish = self._finish, []  # buffers are freed as soon as their owner drops them
        return [step() for step in finish]


class Tokens:
    """The tokens of the ranks of a row: each rank's own (local), and all of them by document and position (joined)."""

    def __init__(self, comm: Comm, layout: Geometry, ranks: range) -> None:
        self._rank, self._others = comm.rank, comm.others
        self._counts = [layout.holdings[rank].tokens for rank in ranks]
        self._rows = layout.rows_in_joined(ranks[0], len(ranks))
        self.tokens = self._counts[comm.rank]

    def to_heads(self, x: Tensor, heads: list[slice]) -> Transfer:
        """x (B, T_local, H, D) becomes (B, T_joined, h, D): of each rank's heads, those that `heads` gives this one."""
        mine, rows = heads[self._rank], x.transpose(0, 1)
        buffer = x.new_empty((sum(self._counts), x.shape[0], mine.stop - mine.start, x.shape[3]))
        parts = buffer.split(self._counts)
        parts[self._rank].copy_(rows[:, :, mine])

        def finish() -> Tensor:
            if self._rows is None:
                return buffer.transpose(0, 1)
            row = torch.from_numpy(np.concatenate(self._rows)).to(x.device)
            return torch.empty_like(buffer).index_copy_(0, row, buffer).transpose(0, 1)

        sends = [(peer, rows[:, :, heads[peer]].contiguous()) for peer in self._others]
        return Transfer(sends, [(peer, parts[peer]) for peer in self._others], finish)

    def to_tokens(self, x: Tensor, heads: list[slice], home: Tensor, add: bool = False) -> Transfer:
        """x (B, T_joined, h, D) comes home: into (or added to) the heads `heads` of home (T_local, B, H, D), by rank."""
        rows = x.transpose(0, 1)
        if self._rows is None:
            parts = list(rows.split(self._counts))
        else:
            parts = [rows.index_select(0, torch.from_numpy(row).to(x.device)) for row in self._rows]
        shape = home.shape[:2]
        arriving = [x.new_empty((*shape, part.stop - part.start, x.shape[3])) for part in heads]
        arriving[self._rank] = parts[self._rank]

        def finish() -> Tensor:
            for part, values in zip(heads, arriving, strict=True):
                home[:, :, part] = home[:, :, part] + values if add else values
            return home

        sends = [(peer, parts[peer].contiguous()) for peer in self._others]
        return Transfer(sends, [(peer, arriving[peer]) for peer in self._others], finish)


class UlyssesAttention(Attention):
    __doc__ = (
        (Attention.__doc__ or "")
        + """
    Ulysses sends heads: an all-to-all of q, k and v before the attention, and one of its output after.

    A rank's heads are computed in `head_groups` groups (2), so that the exchanges of one hide under the compute of another.
    A rank computes at most ⌈Hq/P⌉ query heads over the whole pack, whatever the layout. Query heads need not divide by the
    group, and there may be fewer KV heads than ranks; a KV head is sent to each rank that needs it.

    Bytes sent by rank r with Tr tokens (and Kr keys), where hq(p) and hkv(p) are the heads of rank p, over the other ranks
    p, and b bytes an element: forward Σ [Tr·hq(p)·D + Kr·hkv(p)·(D + Dv)]·B·b, then Σ Tp·hq(r)·(Dv·b)·B, and with
    `return_lse` or sinks 4 (8 for fp64) more for each token and head; backward Σ Tr·hq(p)·Dv·B·b (likewise 4 more for the
    gradient of lse), then Σ [Tp·hq(r)·D·b + Kp·hkv(r)·(D + Dv)·c]·B, where c is b, or 4 (8 for fp64) if some KV head is on
    several ranks, whose fp32 contributions are summed at the token's owner in rank order. Memory: q, k, v and out of all
    T tokens for these heads, which also are what is kept for backward.

    Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
    Models" (2023), section 3.
    """
    )

    strategy = Ulysses

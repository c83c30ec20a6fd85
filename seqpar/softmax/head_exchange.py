"""Exchange tokens for heads, and back, among ranks of a group.

Before the exchange a rank has all heads of its own tokens; after it, some heads of the tokens of
all these ranks, in the order of documents and positions. Heads are exchanged group by group
(`head_groups.py`).

Legend: B batch, T_local this rank's tokens, T_merged those of all ranks, H heads and h some of
them, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.comm.exchange import Comm
from seqpar.comm.header import Message
from seqpar.comm.subgroup import SubComm
from seqpar.layout.geometry import Geometry
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.head_groups import HeadGroup, HeadGroups


class Transfer(NamedTuple):
    """The messages that exchange one tensor; `finish` makes the result once they have arrived."""

    sends: list[Message]
    recvs: list[Message]
    finish: Callable[[], Tensor]


class PendingTransfers:
    """Several transfers that are under way in one exchange."""

    def __init__(self, comm: Comm, transfers: list[Transfer], label: str, step: int) -> None:
        self._finish = [transfer.finish for transfer in transfers]
        sends = chain.from_iterable(transfer.sends for transfer in transfers)
        recvs = chain.from_iterable(transfer.recvs for transfer in transfers)
        self._pending = comm.exchange(sends, recvs, label=label, step=step)

    def wait(self) -> list[Tensor]:
        """Wait for all messages, and return each transfer's result."""
        self._pending.wait()
        finish, self._finish = self._finish, []  # `finish` holds buffers: let them be freed
        return [make() for make in finish]


class TokenExchange:
    """How some ranks exchange heads: from all heads of T_local tokens to h heads of T_merged.

    `ranks` are those of the layout; `comm` has just these. `tokens` is T_local.
    """

    def __init__(self, comm: Comm, layout: Geometry, ranks: range) -> None:
        self._rank, self._peers = comm.rank, comm.peers
        self._counts = [layout.holdings[rank].tokens for rank in ranks]
        self._rows = layout.row_order_when_merged(ranks[0], len(ranks))
        self.tokens = self._counts[comm.rank]

    def to_heads(self, x: Tensor, heads: list[slice]) -> Transfer:
        """Return the transfer from x (B, T_local, H, D) to (B, T_merged, h, D).

        `heads` says which heads each rank gets.
        """
        own_heads, rows = heads[self._rank], x.transpose(0, 1)
        shape = sum(self._counts), x.shape[0], own_heads.stop - own_heads.start, x.shape[3]
        buffer = x.new_empty(shape)
        parts = buffer.split(self._counts)
        parts[self._rank].copy_(rows[:, :, own_heads])

        def finish() -> Tensor:
            if self._rows is None:
                return buffer.transpose(0, 1)
            row = torch.from_numpy(np.concatenate(self._rows)).to(x.device)
            return torch.empty_like(buffer).index_copy_(0, row, buffer).transpose(0, 1)

        sends = [(peer, rows[:, :, heads[peer]].contiguous()) for peer in self._peers]
        return Transfer(sends, [(peer, parts[peer]) for peer in self._peers], finish)

    def to_tokens(
        self, x: Tensor, heads: list[slice], target: Tensor, add: bool = False
    ) -> Transfer:
        """Return the transfer of x (B, T_merged, h, D) back to the ranks that hold its tokens.

        It sets `target` (T_local, B, H, D) at each rank's `heads`, or with `add` adds to it, in the
        order of the ranks.
        """
        rows = x.transpose(0, 1)
        if self._rows is None:
            parts = list(rows.split(self._counts))
        else:
            index = [torch.from_numpy(row).to(x.device) for row in self._rows]
            parts = [rows.index_select(0, row) for row in index]
        arriving = [
            x.new_empty((*target.shape[:2], part.stop - part.start, x.shape[3])) for part in heads
        ]
        arriving[self._rank] = parts[self._rank]

        def finish() -> Tensor:
            for part, values in zip(heads, arriving, strict=True):
                target[:, :, part] = target[:, :, part] + values if add else values
            return target

        sends = [(peer, parts[peer].contiguous()) for peer in self._peers]
        return Transfer(sends, [(peer, arriving[peer]) for peer in self._peers], finish)


class HeadExchange:
    """The exchange of heads in one pass, within this rank's row of the mesh.

    Attributes:
        heads: which heads each rank of the row has, in groups.
        queries, keys: how tensors of query and key tokens are exchanged.
        outer: the ranks of this rank's column, among which the outer strategy runs.
    """

    def __init__(
        self,
        comm: Comm,
        call: ResolvedCall,
        heads: HeadGroups,
        size: int,
        label: str,
        outer_name: str,
    ) -> None:
        """Exchange `heads` in rows of `size` ranks; `label` and `outer_name` name messages."""
        index = comm.rank % size
        row = range(comm.rank - index, comm.rank - index + size)
        column = range(index, comm.size, size)
        self._comm = SubComm(comm, row, "heads", label)
        self.outer = SubComm(comm, column, outer_name, label)
        self.heads = heads
        self.queries = TokenExchange(self._comm, call.layout, row)
        self.keys = TokenExchange(self._comm, call.kv_layout, row)
        self._call = merged_call(call, comm.rank, size)

    def own(self, number: int) -> HeadGroup:
        """Return one of this rank's groups of heads."""
        return self.heads.group(number)[self._comm.rank]

    def call(self, group: HeadGroup) -> ResolvedCall:
        """Return the call of these heads, with which the outer strategy computes."""
        return call_of_heads(self._call, group)

    def post(self, transfers: list[Transfer], step: int) -> PendingTransfers:
        """Post the transfers of a group of heads."""
        return PendingTransfers(self._comm, transfers, "heads", step)

    def arrivals(self, of_queries: list[Tensor], of_keys: list[Tensor]) -> Iterator[list[Tensor]]:
        """Yield this rank's heads of these tensors, of all of its row's tokens, group by group.

        Tensors are (B, T_local, H, D). While a group is computed, the next is under way.
        """

        def post(number: int) -> PendingTransfers:
            groups = self.heads.group(number)
            q_heads = [group.q for group in groups]
            kv_heads = [group.arriving_kv for group in groups]
            transfers = [self.queries.to_heads(x, q_heads) for x in of_queries]
            transfers += [self.keys.to_heads(x, kv_heads) for x in of_keys]
            return self.post(transfers, number)

        arriving = post(0)
        for number in range(1, self.heads.count):
            before, arriving = arriving, post(number)
            yield before.wait()
        yield arriving.wait()


def merged_call(call: ResolvedCall, rank: int, size: int) -> ResolvedCall:
    """Return the call as if each row of `size` ranks were one rank with all of their tokens."""
    layout, kv_layout = call.layout.merged_ranks(size), call.kv_layout.merged_ranks(size)
    return replace(call, rank=rank // size, layout=layout, kv_layout=kv_layout)


def call_of_heads(call: ResolvedCall, group: HeadGroup) -> ResolvedCall:
    """Return the call restricted to a group of heads."""
    shape = call.shape._replace(heads=group.q_count, kv_heads=group.kv_count)
    sinks = None if call.sinks is None else call.sinks[group.q]
    return replace(call, shape=shape, sinks=sinks)

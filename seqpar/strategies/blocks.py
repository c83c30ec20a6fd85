"""Blocks: the key rows that one rank needs of another, on their way there, and their gradients on the way back.

On the wire rows come first, (n, B, H, D): for B = 1 a view of the local tensor, and a buffer for many peers is one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.attend import Gradients
from seqpar.comm import Comm, Message, Pending
from seqpar.geometry import Ints, ranges
from seqpar.strategies.call import Call


class Block(NamedTuple):
    """Rows of other ranks, (n, B, H, …) on the wire and (B, n, H, …) for those who compute, complete after `wait`."""

    tensors: list[Tensor]
    pending: Pending

    def wait(self) -> list[Tensor]:
        self.pending.wait()
        return [x.transpose(0, 1) for x in self.tensors]


def post_keys(comm: Comm, call: Call, k: Tensor, v: Tensor, to: Sequence[int], source: Sequence[int], step: int = 0) -> Block:
    """Send each rank in `to` the key rows its queries see, and receive (k, v) that ours see from each in `source`."""
    counts = [call.slices(comm.rank, peer).keys for peer in source]
    buffers = [x.new_empty((sum(counts), x.shape[0], *x.shape[2:])) for x in (k, v)]
    recvs = [(peer, part) for buffer in buffers for peer, part in zip(source, buffer.split(counts), strict=True)]
    sends = [(peer, take_rows(x, call.slices(peer, comm.rank).sent_rows)) for x in (k, v) for peer in to]
    return Block(buffers, comm.exchange(sends, recvs, step))


class Returns:
    """Gradients of key rows on their way to their owners, and those of ours on their way here."""

    def __init__(
        self, comm: Comm, call: Call, gradients: Gradients, to: Sequence[int], source: Sequence[int], step: int = 0
    ) -> None:
        """Send the gradients of a block (`gradients.dk`, `.dv`) of the ranks `to`; receive ours from the ranks `source`."""
        counts = [call.slices(comm.rank, peer).keys for peer in to]
        sends: list[Message] = []
        recvs: list[Message] = []
        self._received: list[tuple[Ints, list[Tensor]]] = []
        parts = [x.transpose(0, 1).contiguous().split(counts) for x in (gradients.dk, gradients.dv)]
        for i, peer in enumerate(to):
            sends += [(peer, part[i]) for part in parts]
        for peer in source:
            slices = call.slices(peer, comm.rank)
            shapes = [(slices.keys, x.shape[0], *x.shape[2:]) for x in (gradients.dk, gradients.dv)]
            buffers = [gradients.dk.new_empty(shape) for shape in shapes]
            recvs += [(peer, buffer) for buffer in buffers]
            self._received.append((slices.sent_rows, buffers))
        self._pending = comm.exchange(sends, recvs, step)

    def add_to(self, gradients: Gradients) -> None:
        """Wait, and add what came to this rank's dk and dv, in the order of the ranks `source`."""
        self._pending.wait()
        for rows, buffers in self._received:
            for total, buffer in zip((gradients.dk, gradients.dv), buffers, strict=True):
                for at_home, part in parts_of_rows(rows, total.device):
                    total[:, at_home] += buffer.transpose(0, 1)[:, part]


def take_rows(x: Tensor, rows: Ints) -> Tensor:
    """(n, B, H, D) contiguous: the row ranges (m, 2) of x (B, T, H, D); a view where that is possible."""
    if len(rows) == 1:
        return x[:, slice(*rows[0])].transpose(0, 1).contiguous()
    return x.transpose(0, 1).index_select(0, torch.from_numpy(ranges(*rows.T)).to(x.device))


def parts_of_rows(rows: Ints, device: torch.device) -> Iterator[tuple[slice | Tensor, slice]]:
    """Local rows and where they stand in a block that consists of the row ranges (m, 2), as few pairs as possible."""
    if len(rows) > 8:
        yield torch.from_numpy(ranges(*rows.T)).to(device), slice(None)
        return
    start = 0
    for first, last in rows.tolist():
        yield slice(first, last), slice(start, start + last - first)
        start += last - first

"""Exchange the key rows that one rank needs of another, and return their gradients.

Messages have rows first, (n, B, H, D), where n is rows, B the batch, H heads and D the head dim.
So for B = 1 a message is a view of the local tensor, and one buffer serves many peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from seqpar.comm.exchange import Comm, Pending
from seqpar.comm.header import Message
from seqpar.dtypes import accumulator_dtype
from seqpar.operands import OperandShape
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.partial import Gradients
from seqpar.softmax.rows import Rows
from seqpar.traffic import Traffic


class PendingBlock(NamedTuple):
    """A block of rows of other ranks that are under way.

    Its tensors are (n, B, H, …); `wait` returns them as (B, n, H, …), as backends take them.
    """

    tensors: list[Tensor]
    pending: Pending

    def wait(self) -> list[Tensor]:
        """Wait for the rows, and return them."""
        self.pending.wait()
        return [x.transpose(0, 1) for x in self.tensors]


def post_keys(
    comm: Comm,
    call: ResolvedCall,
    k: Tensor,
    v: Tensor,
    *,
    to: Sequence[int],
    source: Sequence[int],
    label: str,
    step: int = 0,
) -> PendingBlock:
    """Post the exchange of key rows: k (B, Tkv_local, Hkv, D) and v (B, Tkv_local, Hkv, Dv).

    Each rank in `to` is sent those that its queries see. From each rank in `source` come those that
    this rank's queries see; the block has them in the order of `source`.
    """
    counts = [call.slices(comm.rank, peer).key_rows for peer in source]
    buffers = [x.new_empty((sum(counts), x.shape[0], *x.shape[2:])) for x in (k, v)]
    recvs = [
        (peer, part)
        for buffer in buffers
        for peer, part in zip(source, buffer.split(counts), strict=True)
    ]
    sends = [(peer, Rows.sent(call.slices(peer, comm.rank)).take(x)) for x in (k, v) for peer in to]
    return PendingBlock(buffers, comm.exchange(sends, recvs, label=label, step=step))


class GradientReturn:
    """Gradients of key rows, under way from the ranks that computed them to the rows' owners."""

    def __init__(
        self,
        comm: Comm,
        call: ResolvedCall,
        gradients: Gradients,
        *,
        to: Sequence[int],
        source: Sequence[int],
        label: str,
        step: int = 0,
    ) -> None:
        """Post the exchange.

        dk and dv of `gradients` are of a block with the key rows of the ranks `to`, to which they
        are sent. From the ranks `source` come gradients of this rank's key rows.
        """
        counts = [call.slices(comm.rank, peer).key_rows for peer in to]
        sends: list[Message] = []
        recvs: list[Message] = []
        self._received: list[tuple[Rows, list[Tensor]]] = []
        block = gradients.dk, gradients.dv
        parts = [x.transpose(0, 1).contiguous().split(counts) for x in block]
        for i, peer in enumerate(to):
            sends += [(peer, part[i]) for part in parts]
        for peer in source:
            slices = call.slices(peer, comm.rank)
            shapes = [(slices.key_rows, x.shape[0], *x.shape[2:]) for x in block]
            buffers = [gradients.dk.new_empty(shape) for shape in shapes]
            recvs += [(peer, buffer) for buffer in buffers]
            self._received.append((Rows.sent(slices), buffers))
        self._pending = comm.exchange(sends, recvs, label=label, step=step)

    def add_to(self, gradients: Gradients) -> None:
        """Wait, and add what arrived to this rank's dk and dv, in the order of `source`."""
        self._pending.wait()
        for rows, buffers in self._received:
            for total, buffer in zip((gradients.dk, gradients.dv), buffers, strict=True):
                for local, part in rows.parts(total.device):
                    total[:, local] += buffer.transpose(0, 1)[:, part]


def keys_traffic(call: ResolvedCall, direction: str, step: int, rank: int, peer: int) -> Traffic:
    """Return what `post_keys` sends from a rank to a peer."""
    elements = call.slices(peer, rank).key_rows * _row_elements(call.shape)
    return Traffic(direction, step, peer, 2, elements * call.shape.dtype.itemsize)


def return_traffic(call: ResolvedCall, step: int, rank: int, peer: int) -> Traffic:
    """Return what a `GradientReturn` sends from a rank to a peer."""
    elements = call.slices(rank, peer).key_rows * _row_elements(call.shape)
    total = elements * accumulator_dtype(call.shape.dtype).itemsize
    return Traffic("backward", step, peer, 2, total)


def _row_elements(shape: OperandShape) -> int:
    """Return how many elements k and v have in one row, over the batch and the KV heads."""
    return shape.batch * shape.kv_heads * (shape.dim + shape.value_dim)

"""The transport "scan", which sends states from span to span in blocks. Each rank applies its maps.

A *span* is a range of consecutive tokens of a document on one rank. The *map* of a span is the
function from the state before the span to the state after the span. The algorithm is from "ZeCO"
(2025), section 3, with a map in place of a decay. If (A, N) is the map of a rank's span, the rank
receives a state S and sends the state A S + N. A block is some heads of a state, or some columns of
one head. A rank sends one block while it receives the next block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.attention.operands import OperandShape
from seqpar.comm.messages.comm import Comm
from seqpar.core.arguments import as_int
from seqpar.core.traffic import Traffic
from seqpar.linear.chains import hops_of
from seqpar.linear.maps.map_strategy import MapCall, MapStrategy
from seqpar.linear.maps.maps import Maps, apply
from seqpar.linear.scanning import Index, Rounds, ScannedStates, index_of


@dataclass(frozen=True)
class Scan(MapStrategy):
    routable = False  # ranks skip rounds in which they send and receive nothing
    transport = "scan"
    blocks: int = 4  # the largest number of blocks into which a state is cut

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", as_int("blocks", self.blocks, 1, 2**20))

    def exchange(self, comm: Comm, call: MapCall, device: torch.device, backward: bool) -> _Scanned:
        return _Scanned(comm.channel("scan"), call, device, backward, self.blocks)

    def exchange_traffic(self, call: MapCall, rank: int) -> list[Traffic]:
        blocks = blocks_of(call.shape, self.blocks)
        block_bytes = call.state_bytes // blocks
        return [
            Traffic(direction, hop.depth + block, hop.target, 1, hop.rows.size * block_bytes)
            for direction in ("forward", "backward")
            for hop in hops_of(call.routes, rank, direction == "backward", ends=False)
            for block in range(blocks)
            if hop.source == rank != hop.target
        ]


class _Scanned(ScannedStates):
    """The exchange of the transport "scan". `wait` returns the states before the spans of this
    rank.

    A *span* is a range of a document's tokens on one rank. States are cut into blocks. In this
    class, states are transposed, (n, B, H, V, K), so that a block consists of some rows of K
    elements.
    """

    def __init__(
        self, comm: Comm, call: MapCall, device: torch.device, backward: bool, blocks: int
    ) -> None:
        rank, routes, shape = comm.rank, call.routes, call.shape
        self._kind, self._value_dim = call.options.kind, shape.value_dim
        hops = hops_of(routes, rank, backward, ends=False)
        spans = routes.held(rank).states
        counts = spans.states_out, spans.states_in

        def build() -> tuple[Rounds, list[Index]]:
            rows = shape.batch * shape.kv_heads * shape.value_dim
            sources, stations = reversed(counts) if backward else counts
            parts = blocks_of(shape, blocks)
            plan = Rounds(hops, rank, sources, stations, rows, parts)
            carriers = [
                index_of(hop.own_states[hop.carries_from >= 0])
                for hop in hops
                if hop.source == rank
            ]
            return plan, carriers

        plan, self._carriers = call.once_on(device, ("map rounds", backward, blocks), build)
        super().__init__(comm, plan, f"recurrent {'backward' if backward else 'forward'}")

    def post(self, maps: Maps) -> None:
        self._transition = maps.transition.flatten(1, 2)  # (n, B·H, …)
        self._begin(maps.state.mT.contiguous(), [self._transition])

    def wait(self) -> Tensor:
        return super().wait().mT.contiguous()

    def _carry(self, number: int, message: Tensor, carried: Tensor) -> None:
        if not carried.numel():
            return
        block, hop = divmod(number, len(self._carriers))
        rows = message.shape[1]
        first, heads = block * rows // self._value_dim, max(1, rows // self._value_dim)
        transition = self._transition[self._carriers[hop], None, first : first + heads]
        by_head = message.shape[0], 1, heads, rows // heads, message.shape[2]
        arrived = carried.view(by_head).mT
        message.view(by_head).add_(apply(self._kind, transition, arrived).mT)


def blocks_of(shape: OperandShape, blocks: int) -> int:
    """Return the number of equal blocks into which a state is cut, which is at most `blocks`.

    A block has whole heads, or some columns of one head.
    """
    heads = shape.batch * shape.kv_heads
    fits = (
        n
        for n in range(1, min(blocks, heads * shape.value_dim) + 1)
        if heads % n == 0 or (n % heads == 0 and shape.value_dim % (n // heads) == 0)
    )
    return max(fits, default=1)

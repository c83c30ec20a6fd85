"""ZeCO's All-Scan: a transport for LASP-2 that sends sums of states from rank to rank.

A *span* is a range of consecutive tokens of a document on one rank. The *state* of a span is a
matrix for each KV head: the sum of the outer products k vᵀ of the span's tokens. A rank receives
the sum of the states before its span, adds the state of its span, and sends the new sum to the next
rank. Without causality, the last rank computes the sum of all states, and the sum is sent back from
rank to rank.

The method is from "ZeCO: Zero Communication Overhead Sequence Parallelism for Linear Attention"
(2025), section 3. If λ is the decay and a span has L tokens, a rank sends λ^L times the received
sum, plus the state of its span. A state is cut into K blocks. After the time of (P − 2 + K) / K
transfers of a whole state, all P ranks have the states that they need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from seqpar.attention.operands import OperandShape
from seqpar.comm.messages.comm import Comm
from seqpar.core.arguments import Ints, as_int
from seqpar.core.device_tables import TableHolder
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.traffic import Traffic
from seqpar.linear.chains import hops_of
from seqpar.linear.linear_strategy import Exchange
from seqpar.linear.scanning import Rounds, ScannedStates, joined
from seqpar.linear.states.state_options import StateOptions
from seqpar.linear.states.state_strategy import StateCall, StateStrategy


@dataclass(frozen=True)
class ZeCO(StateStrategy):
    """The strategy that sends sums of states from rank to rank along each document."""

    name = "zeco"
    transport = "scan"
    routable = False  # ranks skip steps in which they send and receive nothing
    blocks: int = 4  # the largest number of blocks into which a state is cut

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", as_int("blocks", self.blocks, 1, 2**20))

    def exchange(
        self, comm: Comm, call: StateCall, device: torch.device, backward: bool
    ) -> Exchange[Tensor]:
        return _Scanned(comm.channel("scan"), call, device, backward, self.blocks)

    def exchange_traffic(self, call: StateCall, rank: int) -> list[Traffic]:
        blocks = blocks_of(call.shape, self.blocks)
        block_bytes = call.state_bytes // blocks
        return [
            Traffic(direction, hop.depth + block, hop.target, 1, hop.rows.size * block_bytes)
            for direction in ("forward", "backward")
            for hop in hops_of(call.routes, rank, direction == "backward")
            for block in range(blocks)
            if hop.source == rank != hop.target
        ]


class _Scanned(ScannedStates):
    def __init__(
        self, comm: Comm, call: StateCall, device: torch.device, backward: bool, blocks: int
    ) -> None:
        rank, routes, shape = comm.rank, call.routes, call.shape
        hops = hops_of(routes, rank, backward)

        def build() -> tuple[Rounds, _Decays]:
            sources, stations = (
                points(rank, backward).slots.size for points in (routes.sources, routes.stations)
            )
            rows = shape.batch * shape.kv_heads * shape.dim
            parts = blocks_of(shape, blocks)
            plan = Rounds(hops, rank, sources, stations, rows, parts)
            leaving = joined([hop.rows for hop in hops if hop.source == rank])
            return plan, _Decays(plan, leaving, shape)

        plan, decays = call.once_on(device, ("rounds", backward, blocks), build)
        self._weights = call.options.once(device, decays, decays.weights)
        super().__init__(comm, plan, f"zeco {'backward' if backward else 'forward'}")

    def post(self, states: Tensor) -> None:
        self._begin(states, [x for x in self._weights if x is not None])

    def _carry(self, number: int, message: Tensor, carried: Tensor) -> None:
        weights = self._weights[number]
        if weights is None:
            message.add_(carried)
        else:
            message.addcmul_(carried, weights)


class _Decays(TableHolder):
    """The decays of the sums that a rank sends. `rows` has the number of tokens of each decay."""

    def __init__(self, plan: Rounds, rows: Ints, shape: OperandShape) -> None:
        heads = np.arange(plan.blocks * plan.rows) // shape.dim % shape.kv_heads
        self._rows = torch.from_numpy(rows.astype(np.float64)[:, None])
        self._heads = torch.from_numpy(heads.reshape(plan.blocks, 1, plan.rows))
        self._dtype = accumulator_dtype(shape.dtype)
        self._leaving, self._carriers = plan.leaving, plan.carriers

    def weights(self, options: StateOptions) -> Sequence[Tensor | None]:
        """Return the decay factors of each message, (sums, rows of a block, 1).

        Without decay, the result has None for each message.
        """
        if options.log_decay is None:
            return [None] * len(self._leaving)
        # (blocks, sums, rows of a block)
        powers = torch.exp(self._rows * options.log_decay[self._heads])
        of_messages = powers.to(self._dtype).flatten(0, 1)[..., None].split(self._leaving)
        return [x[: self._carriers.get(number)] for number, x in enumerate(of_messages)]


def blocks_of(shape: OperandShape, blocks: int) -> int:
    """Return the number of equal blocks into which the B·Hkv·D rows of a state are cut.

    The number is the largest divisor of B·Hkv·D that is at most `blocks`.
    """
    rows = shape.batch * shape.kv_heads * shape.dim
    return max((n for n in range(1, min(blocks, rows) + 1) if rows % n == 0), default=1)

"""The base class of strategies whose queries stay while keys and values travel.

Subclasses choose which ranks' keys arrive together, and how many exchanges are posted ahead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch

from seqpar.comm.messages.exchange import Comm
from seqpar.core.traffic import Traffic
from seqpar.softmax.attend import attend_blocks
from seqpar.softmax.call import Operands, ResolvedCall
from seqpar.softmax.compute.partial import OutputGradient
from seqpar.softmax.keys.exchange import attend_backward_to_all, travelling_keys
from seqpar.softmax.keys.invariant_attention import TileCall
from seqpar.softmax.keys.invariant_plan import tile_areas, tile_traffic
from seqpar.softmax.keys.plan import Distances, KeyPlan, key_areas, key_traffic
from seqpar.softmax.strategy import ForwardResult, Gradients, Strategy
from seqpar.softmax.wire.quantize import check_digits, check_message_dtype


@dataclass(frozen=True)
class KeyStrategy(Strategy):
    """Keys and values travel in steps; in backward their gradients return to the owners."""

    message_dtype: torch.dtype | None = None  # of keys and values: None is their own, or 8 bits

    def __post_init__(self) -> None:
        check_message_dtype(self.message_dtype)

    def check(self, call: ResolvedCall) -> None:
        check_digits(self.message_dtype, call.shape.dtype)

    def anchor(self) -> Self:
        if self.message_dtype is not None:  # keys of other ranks would have 8 bits, own keys more
            raise ValueError('message_dtype must be None with deterministic="ranks"')
        return replace(self, anchored=True)

    def _tiles(self, comm: Comm, call: ResolvedCall, direction: str) -> TileCall:
        distances = tuple(map(tuple, self.distances(call.ranks)))
        return TileCall(comm, call, distances, f"{self.name} {direction}, tiles")

    def distances(self, ranks: int) -> Distances:
        """Return, for each step, the distances d: rank r receives keys of rank r − d."""
        raise NotImplementedError

    def ahead(self, ranks: int) -> int:
        """Return the number of steps whose exchanges are under way while a rank computes."""
        raise NotImplementedError

    def plan(self, call: ResolvedCall, every_step: bool = False) -> KeyPlan:
        """Return the call's plan, made once per layout and mask.

        With `every_step` it has steps in which this rank sends and receives no rows; it may still
        relay messages of other ranks.
        """
        build = lambda: KeyPlan(call, self.distances(call.ranks), every_step)  # noqa: E731
        return call.once(("keys", self, every_step), build)

    def forward(self, comm: Comm, call: ResolvedCall, operands: Operands) -> ForwardResult:
        if self.anchored:
            return self._tiles(comm, call, "forward").forward(operands)
        q, k, v, sinks = operands
        plan, label = self.plan(call, comm.is_routed), f"{self.name} forward"
        ahead = self.ahead(call.ranks)
        keys = travelling_keys(comm, plan.steps, k, v, label, ahead, self.message_dtype)
        out, lse = attend_blocks(q, keys, plan.blocks, call.options, sinks, None, call.max_logits)
        return ForwardResult(out, lse, [])

    def gradients(
        self,
        comm: Comm,
        call: ResolvedCall,
        output: OutputGradient,
        operands: Operands,
    ) -> Gradients:
        if self.anchored:
            return self._tiles(comm, call, "backward").gradients(output, operands)
        plan, label = self.plan(call, comm.is_routed), f"{self.name} backward"
        _, k, v, _ = operands
        ahead = self.ahead(call.ranks)
        keys = travelling_keys(comm, plan.steps, k, v, label, ahead, self.message_dtype)
        return attend_backward_to_all(comm, call, plan, output, operands, keys, label)

    def areas(self, call: ResolvedCall, rank: int) -> list[int]:
        distances = self.distances(call.ranks)
        return (tile_areas if self.anchored else key_areas)(call, rank, distances)

    def traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        distances = self.distances(call.ranks)
        if self.anchored:
            return tile_traffic(call, rank, distances)
        return key_traffic(call, rank, distances, self.message_dtype)

"""`KeyStrategy`, the base class of Ring and AllGather.

Queries stay on their ranks. Keys and values are sent in steps. In backward, the gradients of keys
and values are sent back to the ranks that hold the keys. A subclass chooses the ranks from which
keys arrive in each step, and the number of steps whose messages are posted ahead of the
computation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from seqpar.comm.messages.comm import Comm
from seqpar.core.dtypes import accumulator_dtype
from seqpar.core.traffic import Traffic
from seqpar.softmax.attend import attend_backward, attend_blocks
from seqpar.softmax.call import Operands, ResolvedCall
from seqpar.softmax.compute.partial import OutputGradient, PackedGradients
from seqpar.softmax.keys.key_exchange import (
    GradientReturn,
    PassBuffers,
    gradient_buffer,
    key_buffers,
    travelling_keys,
)
from seqpar.softmax.keys.key_plan import (
    Distances,
    HeadSlices,
    KeyPlan,
    gradients_by_group,
    head_groups,
    key_areas,
    key_traffic,
)
from seqpar.softmax.keys.rank_invariant_attention import TileCall
from seqpar.softmax.keys.rank_invariant_plan import tile_areas, tile_traffic
from seqpar.softmax.replay import replayed
from seqpar.softmax.result_dtypes import ResultDtypes, ranks_have_equal_kernels, result_dtypes
from seqpar.softmax.strategy import ForwardResult, Gradients, Strategy
from seqpar.softmax.wire.message_buffers import MessageBuffers
from seqpar.softmax.wire.message_dtypes import (
    check_digits,
    check_gradient_digits,
    check_gradient_dtype,
    check_message_dtype,
)


@dataclass(frozen=True)
class KeyStrategy(Strategy):
    """The base class of strategies that send keys and values in steps.

    Queries stay on their ranks. In backward, the gradients of keys and values return to the ranks
    that hold the keys.
    """

    # The dtype in which k and v are sent: an 8-bit dtype, or None for their own dtype.
    message_dtype: torch.dtype | None = None
    # The dtype in which dk and dv return: bf16, or None for the accumulator's dtype.
    gradient_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_message_dtype(self.message_dtype)
        check_gradient_dtype(self.gradient_dtype)

    @property
    def takes_most_documents(self) -> bool:
        return not self.rank_invariant

    def check(self, call: ResolvedCall) -> None:
        check_digits(self.message_dtype, call.shape.dtype)
        check_gradient_digits(self.gradient_dtype, call.shape.dtype)

    def to_rank_invariant(self) -> Self:
        # Keys of other ranks would have 8 bits, and a rank's own keys more bits.
        if self.message_dtype is not None:
            raise ValueError('message_dtype must be None with deterministic="ranks"')
        if self.gradient_dtype is not None:  # a rank's own contributions would have more digits
            raise ValueError('gradient_dtype must be None with deterministic="ranks"')
        return replace(self, rank_invariant=True)

    def _tiles(self, comm: Comm, call: ResolvedCall, direction: str) -> TileCall:
        distances = tuple(map(tuple, self.distances(call.ranks)))
        return TileCall(comm, call, distances, f"{self.name} {direction}, tiles")

    def distances(self, ranks: int) -> Distances:
        """Return the distances of each step.

        In a step with distance d, rank r receives keys of rank r − d.
        """
        raise NotImplementedError

    def ahead(self, ranks: int) -> int:
        """Return the number of steps whose messages are sent while a rank computes."""
        raise NotImplementedError

    def plan(self, call: ResolvedCall, every_step: bool = False) -> KeyPlan:
        """Return the plan of this rank, which is made once per layout and mask.

        Steps in which the rank sends and receives no rows are left out, unless `every_step` is
        True. Ranks that relay messages for other ranks need every step.
        """
        build = lambda: KeyPlan(call, self.distances(call.ranks), every_step)  # noqa: E731
        return call.once(("keys", self, every_step), build)

    def forward(self, comm: Comm, call: ResolvedCall, operands: Operands) -> ForwardResult:
        if self.rank_invariant:
            return self._tiles(comm, call, "forward").forward(operands)
        # Compares kernels now, so that backward need not exchange messages for it.
        ranks_have_equal_kernels(comm, call)
        compute = lambda comm, *operands: self._forward(comm, call, Operands(*operands))  # noqa: E731
        out, lse = replayed(("forward", self), comm, call, operands, compute)
        return ForwardResult(out, lse, [])

    def _forward(self, comm: Comm, call: ResolvedCall, operands: Operands) -> tuple[Tensor, Tensor]:
        groups = self.groups(call, comm.is_routed)
        buffers = self._key_buffers(comm, call, operands, len(groups))
        if len(groups) == 1:
            return self._attend(comm, call, operands, buffers)
        q, value_dim = operands.q, operands.v.shape[3]
        out = q.new_empty((*q.shape[:-1], value_dim))
        lse = q.new_empty(q.shape[:-1], dtype=accumulator_dtype(q.dtype))
        for heads in groups:
            of_heads = call.with_heads_of(call, heads.queries)
            into = out[:, :, heads.queries], lse[:, :, heads.queries]
            self._attend(comm, of_heads, heads.operands(operands), buffers, into)
        return out, lse

    def groups(self, call: ResolvedCall, every_step: bool = False) -> list[HeadSlices]:
        """Return the groups of heads that are sent and computed one after another.

        A rank that sends and receives no rows in any step has one group with all heads.
        """

        def build() -> list[HeadSlices]:
            if self.plan(call, every_step).steps:
                return head_groups(call.shape, call.kv_layout, call.mask)
            return [HeadSlices(slice(None), slice(None))]

        return call.once(("groups", self, every_step), build)

    def _key_buffers(
        self, comm: Comm, call: ResolvedCall, operands: Operands, groups: int
    ) -> MessageBuffers:
        steps, ahead = self.plan(call, comm.is_routed).steps, self.ahead(call.ranks)
        (batch, _, kv_heads, dim), value_dim = operands.k.shape, operands.v.shape[3]
        rows = batch * -(-kv_heads // groups)  # rows of a token in the largest group
        return key_buffers(steps, ahead, rows, [dim, value_dim], self.message_dtype, groups)

    def _attend(
        self,
        comm: Comm,
        call: ResolvedCall,
        operands: Operands,
        buffers: MessageBuffers,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the attention (out, lse) of the heads in `operands`.

        If `into` is given, the result is written to the two tensors of `into`.
        """
        q, k, v, sinks = operands
        plan, label = self.plan(call, comm.is_routed), f"{self.name} forward"
        ahead = self.ahead(call.ranks)
        keys = travelling_keys(comm, plan.steps, (k, v), label, ahead, self.message_dtype, buffers)
        return attend_blocks(q, keys, plan.blocks, call.options, sinks, into, call.max_logits)

    def gradients(
        self, comm: Comm, call: ResolvedCall, output: OutputGradient, operands: Operands
    ) -> Gradients:
        if self.rank_invariant:
            return self._tiles(comm, call, "backward").gradients(output, operands)
        dtypes = result_dtypes(comm, call, True, self.gradient_dtype)

        def compute(comm: Comm, *tensors: Any) -> Gradients:
            output, operands = OutputGradient(*tensors[:5]), Operands(*tensors[5:])
            return self._gradients(comm, call, output, operands, dtypes)

        of_output = output.dout, output.out, output.lse, output.dlse, output.delta
        name = "backward", self, dtypes
        dq, dk, dv = replayed(name, comm, call, (*of_output, *operands), compute)
        return dq, dk, dv

    def _gradients(
        self,
        comm: Comm,
        call: ResolvedCall,
        output: OutputGradient,
        operands: Operands,
        dtypes: ResultDtypes,
    ) -> Gradients:
        groups = self.groups(call, comm.is_routed)
        (batch, _, kv_heads, dim), value_dim = operands.k.shape, operands.v.shape[3]
        # Elements per token in the largest group.
        width = batch * -(-kv_heads // len(groups)) * (dim + value_dim)
        steps = self.plan(call, comm.is_routed).steps
        buffers = PassBuffers(
            self._key_buffers(comm, call, operands, len(groups)),
            gradient_buffer(steps, width, len(groups), dtypes),
        )

        def add(
            heads: HeadSlices, output: OutputGradient, own: Operands, total: PackedGradients
        ) -> None:
            of_group = call if len(groups) == 1 else call.with_heads_of(call, heads.queries)
            self._attend_backward(comm, of_group, output, own, total, buffers, dtypes)

        return gradients_by_group(groups, output, operands, add)

    def _attend_backward(
        self,
        comm: Comm,
        call: ResolvedCall,
        output: OutputGradient,
        operands: Operands,
        total: PackedGradients,
        buffers: PassBuffers,
        dtypes: ResultDtypes,
    ) -> None:
        """Add the gradients of the heads in `operands` to `total`.

        The gradients of the keys of one step are sent back to the ranks that hold the keys, while
        the next step is computed. Each rank adds the gradients of its keys in the order of the
        steps.
        """
        plan, label = self.plan(call, comm.is_routed), f"{self.name} backward"
        (q, k, v, _), options, ahead = operands, call.options, self.ahead(call.ranks)
        keys = travelling_keys(
            comm, plan.steps, (k, v), label, ahead, self.message_dtype, buffers.keys
        )
        returning: GradientReturn | None = None
        next(keys)
        attend_backward(output, q, k, v, plan.own[0], total, options)
        for step in plan.steps:
            k_block, v_block = next(keys)
            gradients = total.of_block(k_block, v_block) if step.travels else None
            if gradients is not None:
                attend_backward(output, q, k_block, v_block, step.slices, gradients, options)
            del k_block, v_block
            if returning is not None:
                returning.add_to(total)
            message = None
            if gradients is not None:
                message = gradients.message(dtypes.of(step.leave_of_one_call))
            arriving = dtypes.of(step.return_of_one_call)
            returning = GradientReturn(comm, label, step, message, arriving, buffers.gradients)
            del gradients, message
        keys.close()  # frees the block of the last step
        if returning is not None and plan.ends_early:
            # This rank left out the last steps. Gradients are added here, before the second half of
            # the local work, so that sums have the same bits as with all steps.
            returning.add_to(total)
            returning = None
        for slices in plan.own[1:]:
            attend_backward(output, q, k, v, slices, total, options)
        if returning is not None:
            returning.add_to(total)

    def areas(self, call: ResolvedCall, rank: int) -> list[int]:
        distances = self.distances(call.ranks)
        return (tile_areas if self.rank_invariant else key_areas)(call, rank, distances)

    def traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        distances = self.distances(call.ranks)
        if self.rank_invariant:
            return tile_traffic(call, rank, distances)
        groups = len(head_groups(call.shape, call.kv_layout, call.mask))
        dtypes = result_dtypes(None, call, True, self.gradient_dtype)
        return key_traffic(call, rank, distances, self.message_dtype, dtypes, groups)

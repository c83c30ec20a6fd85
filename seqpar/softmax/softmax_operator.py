"""The operator `seqpar::attention` and its backward.

The operator checks a call, runs the strategy, and saves tensors for backward. Its results are, in
this order, out, lse, the max logits if they were requested, and the *residuals*, which are the
tensors that the strategy keeps for backward.

The file also counts FLOPs for torch's FlopCounterMode. Only the (query, key) pairs that this rank
computes are counted. A multiplication with an addition counts as 2 FLOPs. Forward has two matrix
products, q·k and probabilities·v. Backward computes q·k again and has four more products. As in
torch, the softmax is not counted.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seqpar.attention.backend import DEFAULT, rank_invariant_refusal, refusal, triton_refusal
from seqpar.attention.operands import OperandShape, check_operands, naming_rank
from seqpar.attention.operators import (
    CallOperator,
    Compared,
    Results,
    Saved,
    differentiated,
    unit_stride,
)
from seqpar.attention.rehearsal import upload_tables
from seqpar.comm.agreement import Described
from seqpar.comm.binding import BoundStrategy
from seqpar.comm.dtensor import HeadPlacement
from seqpar.comm.messages.comm import Comm
from seqpar.core.device_tables import is_on_cuda
from seqpar.core.dtypes import DTYPES, accumulator_dtype
from seqpar.layout.handle import key_of
from seqpar.softmax.call import CARRIED, CallArguments, Operands, ResolvedCall
from seqpar.softmax.compute.max_logits import MaxLogits
from seqpar.softmax.compute.partial import cast_each, sinks_gradient
from seqpar.softmax.strategy import ForwardResult, Strategy

Bound = BoundStrategy[Strategy]


class AttentionOperator(CallOperator[Operands, CallArguments, ResolvedCall]):
    name = "attention"
    outs = 2  # out and lse

    def __init__(self) -> None:
        super().__init__(Operands, CallArguments)

    def resolve(self, bound: Bound, tensors: Operands, arguments: CallArguments) -> ResolvedCall:
        with naming_rank(bound.comm):
            bound.comm.check_device("q", tensors.q.device)
            shape = OperandShape.of(tensors.q, tensors.k, tensors.v)
            has_sinks = tensors.sinks is not None
            call = arguments.to_call(bound.comm, shape, has_sinks, tensors.q.device)
            _check_tensors(call, tensors)
            self.check(bound, call, tensors, arguments)
        return call

    def check(
        self, bound: Bound, call: ResolvedCall, tensors: Operands, arguments: CallArguments
    ) -> None:
        strategy = bound.strategy
        if call.layout.cut.most_documents:
            routed = bound.routing is not None
            check_most_documents(strategy, arguments.return_max_logits, routed)
            _check_kernel_of_most_documents(call, tensors)
        strategy.check(call)
        if strategy.rank_invariant:
            reason = rank_invariant_refusal(call.options.backend, tensors.q, tensors.v)
            if reason:
                raise ValueError(reason)
        if arguments.return_max_logits and not strategy.finds_max_logits:
            raise ValueError("return_max_logits must be False: servers return no scores")

    def agreed(
        self, bound: Bound, call: ResolvedCall, arguments: CallArguments, exact: bool
    ) -> Described:
        described = call.shape.described() | arguments.agreed(call.has_sinks, exact)
        try:
            return described | bound.strategy.agreed(call)
        except (ValueError, TypeError):  # a wrong `backward_plan`; backward raises its error
            return described

    def key(self, call: ResolvedCall, arguments: CallArguments) -> Hashable:
        kv_key = None if call.kv_layout is call.layout else key_of(arguments.kv_layout.numpy())
        has_slopes = arguments.alibi_slopes is not None
        form = call.rank, kv_key, call.shape, call.has_sinks, has_slopes
        return *form, *arguments.mask_contents(), *arguments[CARRIED.tensors :]

    def compared(self, tensors: Operands, arguments: CallArguments) -> Compared:
        return {"sinks": tensors.sinks, "alibi_slopes": arguments.alibi_slopes}

    def forward(
        self,
        strategy: Strategy,
        comm: Comm,
        call: ResolvedCall,
        tensors: Operands,
        arguments: CallArguments,
    ) -> Results:
        tensors, call = self.prepared(strategy, comm, call, tensors, arguments)
        return self.results(strategy.forward(comm, call, tensors), comm, call)

    def prepared(
        self,
        strategy: Strategy,
        comm: Comm,
        call: ResolvedCall,
        tensors: Operands,
        arguments: CallArguments,
    ) -> tuple[Operands, ResolvedCall]:
        """Return operands whose last dimension has stride 1, and the call that the strategy runs.

        The returned call has a `MaxLogits` if the user requested max logits.
        """
        q, k, v, sinks = tensors
        if arguments.return_max_logits:
            call = replace(call, max_logits=MaxLogits.nothing(q))
        upload_tables(strategy, comm, call, q.device, differentiated(tensors))
        return Operands(unit_stride(q), unit_stride(k), unit_stride(v), sinks), call

    def results(self, result: ForwardResult, comm: Comm, call: ResolvedCall) -> Results:
        max_logits = [] if call.max_logits is None else [call.max_logits.of_all_ranks(comm)]
        return Results([result.out, result.lse], [*max_logits, *result.residuals])

    def empty(self, bound: Bound, tensors: Operands, arguments: CallArguments) -> Results:
        q, k, v, _ = tensors
        residuals = bound.strategy.empty_residuals(
            bound.comm, q, k, v, arguments.tokens, arguments.kv_tokens
        )
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = q.new_empty(q.shape[:-1], dtype=accumulator_dtype(q.dtype))
        max_logits = [MaxLogits.nothing(q).values] if arguments.return_max_logits else []
        return Results([out, lse], [*max_logits, *residuals])

    def save(
        self,
        bound: Bound,
        tensors: Operands,
        arguments: CallArguments,
        outs: Sequence[Tensor],
        kept: Sequence[Tensor],
    ) -> Saved:
        (q, k, v, sinks), (out, lse) = tensors, outs
        residuals = kept[arguments.return_max_logits :]
        if not residuals or bound.strategy.keeps_operands:
            residuals = [q, k, v, out, lse, *residuals]
        of_sinks = (None, None, None) if sinks is None else (out, lse, sinks)
        return Saved([*residuals, *of_sinks], [*q.shape, *k.shape, *v.shape])

    def resolve_again(
        self, bound: Bound, comm: Comm, arguments: CallArguments, saved: Saved
    ) -> tuple[ResolvedCall, Compared]:
        sinks, slopes = saved.tensors[-1], arguments.alibi_slopes
        device = _saved_q(saved).device
        call = arguments.to_call(comm, _saved_shape(saved), sinks is not None, device)
        return call, {"sinks": sinks, "alibi_slopes": slopes}

    def backward(
        self,
        strategy: Strategy,
        comm: Comm,
        call: ResolvedCall,
        gradients: Sequence[Tensor | None],
        saved: Saved,
    ) -> list[Tensor]:
        dout, dlse = gradients
        *kept, out, lse, sinks = saved.tensors
        residuals = [unit_stride(x) for x in kept if x is not None]
        if dout is None:
            q_shape, _, v_shape = _saved_sizes(saved)
            dout = residuals[0].new_zeros((*q_shape[:-1], v_shape[-1]))
        dout, dtype = unit_stride(dout), call.shape.dtype
        cast = cast_each(strategy.backward(comm, call, dout, dlse, sinks, residuals), dtype)
        if sinks is None or out is None or lse is None:
            return cast
        return [*cast, sinks_gradient(dout, out, lse, sinks)]

    def empty_gradients(self, arguments: CallArguments, saved: Saved) -> list[Tensor]:
        like, sinks = saved.tensors[0], saved.tensors[-1]
        assert like is not None
        gradients = [like.new_empty(sizes) for sizes in _saved_sizes(saved)]
        return gradients if sinks is None else [*gradients, sinks.new_empty(sinks.shape)]

    def flops(self, tensors: Operands, arguments: CallArguments) -> int:
        shape = OperandShape.of(tensors.q, tensors.k, tensors.v)
        area = _area(shape, tensors.q.device, arguments, backward=False)
        return 2 * area * (shape.dim + shape.value_dim)

    def backward_flops(self, arguments: CallArguments, saved: Saved) -> int:
        shape = _saved_shape(saved)
        area = _area(shape, _saved_q(saved).device, arguments, backward=True)
        return 2 * area * (3 * shape.dim + 2 * shape.value_dim)


def _saved_sizes(saved: Saved) -> list[Sequence[int]]:
    return [saved.sizes[i : i + 4] for i in (0, 4, 8)]


def _saved_q(saved: Saved) -> Tensor:
    assert saved.tensors[0] is not None
    return saved.tensors[0]


def _saved_shape(saved: Saved) -> OperandShape:
    return OperandShape.of_sizes(_saved_q(saved).dtype, *_saved_sizes(saved))


def _area(
    shape: OperandShape, device: torch.device, arguments: CallArguments, backward: bool
) -> int:
    """Return how many (query, key) pairs this rank computes, over all heads and batch entries."""
    bound: Bound = BoundStrategy.of(arguments.strategy)
    call = arguments.to_call(bound.comm, shape, False, device)
    areas = bound.strategy.backward_areas if backward else bound.strategy.areas
    return shape.batch * sum(areas(call, bound.comm.rank))


def _check_tensors(call: ResolvedCall, tensors: Operands) -> None:
    q, k, v, sinks = tensors
    tokens = call.layout.holdings[call.rank].tokens
    kv_tokens = call.kv_layout.holdings[call.rank].tokens
    check_operands(q, k, v, tokens, kv_tokens)
    if call.options.backend != DEFAULT and (
        reason := refusal("softmax", call.options.backend, q, v)
    ):
        raise ValueError(reason)
    heads = q.shape[2]
    if sinks is not None and (tuple(sinks.shape) != (heads,) or sinks.dtype not in DTYPES):
        actual = f"{tuple(sinks.shape)} of {sinks.dtype}"
        raise ValueError(f"sinks must be ({heads},) floats, one per query head, got {actual}")


def check_most_documents(strategy: Strategy, max_logits: bool, routed: bool) -> None:
    """Raise a ValueError if the messages of a call depend on the documents of its layout.

    The layout has `most_documents`, so the messages must not depend on its documents.
    """
    if not strategy.takes_most_documents:
        name = 'deterministic="ranks"' if strategy.rank_invariant else repr(strategy.name)
        raise ValueError(f"layout must have no most_documents with {name}")
    if max_logits:
        raise ValueError("return_max_logits must be False for a layout with most_documents")
    if routed:  # Ranks agree on routes once per layout object, and each step makes a new layout.
        raise ValueError("layout must have no most_documents with routing")


def _check_kernel_of_most_documents(call: ResolvedCall, tensors: Operands) -> None:
    if is_on_cuda(tensors.q):
        backend = call.options.backend
        if backend not in (DEFAULT, "triton"):
            raise ValueError(f"use_backend must be triton with most_documents, got {backend!r}")
        if reason := triton_refusal(tensors.q, tensors.v):
            raise ValueError(f"layout must have no most_documents for this call: {reason}")


ATTENTION = AttentionOperator().registered()


def as_result(
    results: list[Tensor], arguments: CallArguments, heads: HeadPlacement, unbatched: bool
) -> Tensor | tuple[Tensor, ...]:
    """Return what the module returns: out, or a tuple of out and the lse and max logits that the
    user requested.

    `results` are the results of the operator, or only out and lse.
    """
    out, lse = results[:2]
    found: list[Any] = [heads.restore(out[0] if unbatched else out, -2)]
    if arguments.return_lse:
        found.append(heads.restore(lse[0] if unbatched else lse, -1))
    if arguments.return_max_logits and len(results) > 2:
        found.append(heads.restore(results[3], -1))
    return found[0] if len(found) == 1 else tuple(found)

"""Turn the operator's inputs into a resolved call, and compare the call between ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.attention.backend import DEFAULT, rank_invariant_refusal, refusal, triton_refusal
from seqpar.attention.operands import OperandShape, check_operands, digest_of_call, naming_rank
from seqpar.comm.agreement import Described, attempt
from seqpar.comm.binding import BoundStrategy
from seqpar.comm.messages.exchange import Comm
from seqpar.core.device_tables import is_on_cuda
from seqpar.core.dtypes import DTYPES
from seqpar.layout.handle import from_handle, key_of
from seqpar.softmax.call import CallArguments, Operands, ResolvedCall
from seqpar.softmax.strategy import Strategy


def resolve(
    bound: BoundStrategy[Strategy],
    arguments: CallArguments,
    operands: Operands,
    decodes: bool = False,
) -> ResolvedCall:
    """Return the resolved call, if its arguments are right and it can be computed exactly.

    Otherwise raise a ValueError with the argument, its value, the expected values and the rank. A
    call that `decodes` does not depend on the strategy.
    """
    with naming_rank(bound.comm):
        bound.comm.check_device("q", operands.q.device)
        call = arguments.to_call(bound.comm, operands.shape, operands.sinks is not None)
        _check_tensors(call, operands)
        if decodes:
            return call
        if call.layout.cut.most_documents:
            routed = bound.routing is not None
            check_most_documents(bound.strategy, arguments.return_max_logits, routed)
            _check_kernel_of_most_documents(call, operands)
        bound.strategy.check(call)
        if bound.strategy.rank_invariant:
            reason = rank_invariant_refusal(call.options.backend, operands.q, operands.v)
            if reason:
                raise ValueError(reason)
        if arguments.return_max_logits and not bound.strategy.finds_max_logits:
            raise ValueError("return_max_logits must be False: servers return no scores")
    return call


def resolve_on_ranks(
    bound: BoundStrategy[Strategy],
    arguments: CallArguments,
    operands: Operands,
    decodes: bool = False,
) -> tuple[ResolvedCall, Comm]:
    """Return the resolved call and its Comm, whose messages carry a digest of the arguments.

    With `check_ranks`, all ranks raise the same error if one of them refuses the call or their
    calls differ.
    """
    device = operands.q.device
    if bound.check_ranks:
        call, fault = attempt(lambda: resolve(bound, arguments, operands, decodes))
        comm = bound.begin_compared_call(
            device, fault, lambda canonical: _agreed(bound, arguments, operands, canonical, decodes)
        )
    else:
        call = resolve(bound, arguments, operands, decodes)
        comm = bound.begin_call(device)
    describe(comm, bound, arguments, call, device, operands.sinks, decodes)
    return call, comm


def check_most_documents(strategy: Strategy, max_logits: bool, routed: bool) -> None:
    """Refuse a call whose work would depend on the documents of a layout with a limit."""
    if not strategy.takes_most_documents:
        name = 'deterministic="ranks"' if strategy.rank_invariant else repr(strategy.name)
        raise ValueError(f"layout must have no most_documents with {name}")
    if max_logits:
        raise ValueError("return_max_logits must be False for a layout with most_documents")
    if routed:  # ranks agree on routes once per layout, and equal layouts share nothing
        raise ValueError("layout must have no most_documents with routing")


def _check_kernel_of_most_documents(call: ResolvedCall, operands: Operands) -> None:
    if is_on_cuda(operands.q):
        backend = call.options.backend
        if backend not in (DEFAULT, "triton"):
            raise ValueError(f"use_backend must be triton with most_documents, got {backend!r}")
        if reason := triton_refusal(operands.q, operands.v):
            raise ValueError(f"layout must have no most_documents for this call: {reason}")


def _check_tensors(call: ResolvedCall, operands: Operands) -> None:
    q, k, v, sinks = operands
    tokens = call.layout.holdings[call.rank].tokens
    kv_tokens = call.kv_layout.holdings[call.rank].tokens
    check_operands(q, k, v, tokens, kv_tokens)
    if reason := refusal("softmax", call.options.backend, q, v):
        raise ValueError(reason)
    heads = q.shape[2]
    if sinks is not None and (tuple(sinks.shape) != (heads,) or sinks.dtype not in DTYPES):
        actual = f"{tuple(sinks.shape)} of {sinks.dtype}"
        raise ValueError(f"sinks must be ({heads},) floats, one per query head, got {actual}")


def describe(
    comm: Comm,
    bound: BoundStrategy[Strategy],
    arguments: CallArguments,
    call: ResolvedCall,
    device: torch.device,
    sinks: Tensor | None,
    decodes: bool = False,
) -> None:
    """Put a digest of the call's arguments into the headers of its messages."""
    if not comm.has_headers(device):
        return
    slopes = arguments.alibi_slopes

    def described(canonical: bool) -> Described:
        names = shared_values(call.shape, arguments, call.has_sinks, canonical, decodes)
        names |= {"strategy": str(bound.strategy), "routing": str(bound.routing)}
        try:
            return names | bound.strategy.agreed(call)
        except (ValueError, TypeError):  # a wrong backward plan: backward raises its error
            return names

    kv_key = None if call.kv_layout is call.layout else key_of(arguments.kv_layout.numpy())
    key = (
        decodes,
        comm.rank,
        kv_key,
        call.shape,
        arguments.mask_contents(),
        sinks is not None,
        slopes is not None,
        arguments.settings(),
    )
    digest = digest_of_call(call.layout, key, described)
    comm.digest = digest.extended(sinks=sinks, alibi_slopes=slopes)


def shared_values(
    shape: OperandShape,
    arguments: CallArguments,
    has_sinks: bool,
    canonical: bool = False,
    decodes: bool = False,
) -> dict[str, object]:
    """Return the values that must be the same on all ranks; see `CallArguments.shared`.

    In a call that `decodes`, every rank has all queries, so their layouts differ between ranks;
    their documents are compared instead.
    """
    names = shape.described() | arguments.shared(has_sinks, canonical)
    if decodes:
        del names["layout"]
        names["cu_seqlens"] = from_handle(arguments.layout).cu_seqlens.tolist()
    return names


def _agreed(
    bound: BoundStrategy[Strategy],
    arguments: CallArguments,
    operands: Operands,
    canonical: bool,
    decodes: bool,
) -> Described:
    shape, has_sinks = operands.shape, operands.sinks is not None
    described = shared_values(shape, arguments, has_sinks, canonical, decodes)
    slopes = arguments.alibi_slopes
    described["alibi_slopes"] = None if slopes is None or slopes.is_meta else slopes.tolist()
    if decodes:
        return described
    try:
        call = arguments.to_call(bound.comm, shape, has_sinks)
        return described | bound.strategy.agreed(call)
    except (ValueError, TypeError):  # `resolve` has raised it
        return described

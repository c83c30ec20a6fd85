"""Attention by tasks: a pass in two parts, of which the first posts what leaves and what comes.

The second computes: half of the work that is at home altogether, while rows travel; in each stage
the guests' tasks, whose results return at once, and then this rank's own with the keys that came;
and the other half, while the last results return.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.comm.messages.exchange import Comm
from seqpar.softmax.attend import attend, attend_backward, attend_blocks
from seqpar.softmax.call import Operands, ResolvedCall
from seqpar.softmax.compute.partial import OutputGradient, Partial, PartialGradients
from seqpar.softmax.strategy import ForwardResult, Gradients
from seqpar.softmax.tasks.exchange import Returning, TaskExchange
from seqpar.softmax.tasks.plan import TaskPlan, TaskStage


def post_forward(comm: Comm, plan: TaskPlan, label: str, operands: Operands) -> TaskExchange:
    """Post the rows of a forward that leave for servers, and those that come."""
    q, k, v, _ = operands
    return TaskExchange(comm, plan, label, [[q]], [k, v])


def complete_forward(
    exchange: TaskExchange, call: ResolvedCall, operands: Operands, keep: bool
) -> ForwardResult:
    """Return the result; residuals to `keep` are the blocks of queries and of keys that came."""
    (q, k, v, sinks), plan = operands, exchange.plan
    total = Partial.nothing(q, v)
    arrived, returning = _split(exchange.keys, k, v), list[Returning]()
    attend(q, k, v, plan.first, total, call.options, call.max_logits)
    if not plan.away:  # no results return that the other half would hide
        attend(q, k, v, plan.last, total, call.options, call.max_logits)
    for stage, (guests,) in exchange.arrivals():
        results = _serve(guests, [(k, v), arrived], stage, call, total)
        returning.append(exchange.return_results(stage, results))
        del guests, results
        coming, values = (x[:, stage.key_rows] for x in arrived)
        attend(q, coming, values, stage.own, total, call.options, call.max_logits)
        del coming, values
    del arrived
    came = exchange.release()  # which, unless they are kept, frees them
    if not keep:
        came.clear()
    if plan.away:
        attend(q, k, v, plan.last, total, call.options, call.max_logits)
    for each in returning:
        for sent, results in each.wait():
            total.merge(sent.local(q.device), *_out_and_lse(results, q.shape[2]))
    return ForwardResult(*total.finish(sinks, q.dtype), came)


def post_backward(
    comm: Comm,
    call: ResolvedCall,
    plan: TaskPlan,
    label: str,
    output: OutputGradient,
    operands: Operands,
    came: list[Tensor],
) -> TaskExchange:
    """Post the rows of a backward; what `came` in forward, if it was kept, does not come again."""
    q, k, v, _ = operands
    dlse = call.dlse_on_all_ranks(output.dlse, output.dout)
    columns = [output.lse, output.ensure_delta(), *([] if dlse is None else [dlse])]
    rows = [output.dout] if came else [output.dout, q]
    moving = [rows, [torch.stack(columns, -1)]]
    return TaskExchange(comm, plan, label, moving, [k, v], came[1] if came else None)


def complete_backward(
    exchange: TaskExchange,
    call: ResolvedCall,
    output: OutputGradient,
    operands: Operands,
    came: list[Tensor],
) -> Gradients:
    """Return dq, dk and dv, in the accumulator's dtype."""
    q, k, v, _ = operands
    plan, total = exchange.plan, PartialGradients.zeros(q, k, v)
    arrived, of_keys = _split(exchange.keys, k, v), total.of_block(plan.keys)
    blocks = [(k, v, total.dk, total.dv), (*arrived, of_keys.dk, of_keys.dv)]
    attend_backward(output, q, k, v, plan.first, total, call.options)
    returning, returning_keys = list[Returning](), list[Returning]()
    for stage, (guests, statistics) in exchange.arrivals():
        queries = came[0][stage.queries.rows].transpose(0, 1) if came else None
        results = _serve_backward(queries, guests, statistics, blocks, stage, call)
        returning.append(exchange.return_results(stage, results))
        del queries, guests, statistics, results
        coming, values, dk, dv = (x[:, stage.key_rows] for x in blocks[1])
        into = PartialGradients(total.dq, dk, dv)
        attend_backward(output, q, coming, values, stage.own, into, call.options)
        returning_keys.append(exchange.return_gradients(stage, of_keys.packed))
        del coming, values, dk, dv, into
    exchange.release()
    del arrived, of_keys, blocks
    attend_backward(output, q, k, v, plan.last, total, call.options)
    for each in returning:
        for sent, results in each.wait():
            sent.add(results, total.dq.transpose(0, 1))
    for each in returning_keys:
        for sent, results in each.wait():
            sent.add(results, total.packed)
    return total.dq, total.dk, total.dv


def _serve(
    guests: Tensor,
    blocks: list[tuple[Tensor, Tensor]],
    stage: TaskStage,
    call: ResolvedCall,
    total: Partial,
) -> Tensor:
    """Return the results of a stage's guests, (n, B, Hq·(Dv + 1)), in the dtype of `total`.

    `blocks` are k and v of this rank, and of those that come.
    """
    batch, _, heads, dim = total.out.shape
    results = total.out.new_empty((guests.shape[1], batch, heads * (dim + 1)))
    if len(results):
        into = _out_and_lse(results, heads)
        attend_blocks(guests, blocks, stage.blocks, call.options, None, into, call.max_logits)
    return results


def _serve_backward(
    q: Tensor | None,
    guests: Tensor,
    statistics: Tensor,
    blocks: list[tuple[Tensor, Tensor, Tensor, Tensor]],
    stage: TaskStage,
    call: ResolvedCall,
) -> Tensor:
    """Return dq of a stage's guests, (n, B, Hq, D), and add to dk and dv of the blocks.

    With the guests came dout and then q, unless that was kept, and lse, delta and maybe dlse.
    """
    value_dim = blocks[0][1].shape[-1]
    q = guests[..., value_dim:] if q is None else q
    lse, delta, *dlse = statistics.unbind(-1)
    output = OutputGradient(guests[..., :value_dim], None, lse, dlse[0] if dlse else None, delta)
    dq = lse.new_zeros((q.shape[1], q.shape[0], *q.shape[2:]))
    for (k, v, dk, dv), slices in zip(blocks, stage.blocks.slices, strict=True):
        into = PartialGradients(dq.transpose(0, 1), dk, dv)
        attend_backward(output, q, k, v, slices, into, call.options)
    return dq


def _split(block: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the views (B, n, Hkv, D) and (B, n, Hkv, Dv) of a block (n, B, Hkv, D + Dv)."""
    of_k, of_v = block.transpose(0, 1).split_with_sizes([k.shape[3], v.shape[3]], -1)
    return of_k, of_v


def _out_and_lse(results: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return the views out (B, n, Hq, Dv) and lse (B, n, Hq) of results (n, B, Hq·(Dv + 1)).

    A row has out of all heads first, so that each is as well aligned as in a tensor of its own.
    """
    sizes = [results.shape[2] - heads, heads]
    out, lse = results.transpose(0, 1).split_with_sizes(sizes, -1)
    return out.unflatten(-1, (heads, -1)), lse

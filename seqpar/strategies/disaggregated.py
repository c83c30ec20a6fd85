"""Disaggregated attention: a plan decides, task by task, which rank computes what.

Zhuang et al., "Efficient Long-context Language Model Training by Core Attention Disaggregation"
(2025), sections 3 and 4: a task is some queries and the keys that they see, and any rank may serve
it. Servers are in place: every rank is home of its tokens and serves tasks, its own and others'.
Unlike in the paper keys of a task may be split, since partials merge at home; dispatch hides under
the work that stays at home, even with one batch; and results return stage by stage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqpar.arguments import as_float, shown
from seqpar.balance.disaggregate import RowBytes, disaggregate
from seqpar.comm.exchange import Comm
from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.layers import Layer
from seqpar.costs.model import Model
from seqpar.layout.task_rows import TaskRows
from seqpar.layout.tasks import Tasks
from seqpar.softmax.attend import attend, attend_backward, attend_blocks
from seqpar.softmax.call import ResolvedCall
from seqpar.softmax.module import Attention
from seqpar.softmax.partial import Gradients, OutputGradient, Partial
from seqpar.softmax.strategy import ForwardResult, Strategy
from seqpar.softmax.task_exchange import Returning, TaskExchange
from seqpar.softmax.task_plan import Stage, TaskPlan
from seqpar.softmax.task_planner import Planner
from seqpar.softmax.task_traffic import task_traffic
from seqpar.strategies.registry import register
from seqpar.traffic import Traffic

# A stage has at most so many rows of others, if there are not too many for the stages.
_ROWS = 512


@dataclass(frozen=True)
class Disaggregated(Strategy):
    """Queries and keys travel to whoever has time for them, and results return."""

    name = "disaggregated"
    keeps_beside = True
    plan: Any = None  # who computes what: None (its own planner's), Tasks, or what makes them
    keep: str = "home"  # who keeps what a server was sent, for backward
    tolerance: float = 0.05  # by how much the slowest rank of its own plan may exceed the mean

    def __post_init__(self) -> None:
        if self.plan is not None:
            object.__setattr__(self, "plan", Planner.of(self.plan))
        if not isinstance(self.keep, str) or self.keep not in ("home", "server"):
            raise ValueError(f'keep must be "home" or "server", got {shown(self.keep)}')
        tolerance = as_float("tolerance", self.tolerance)
        if not 0 < tolerance < math.inf:
            raise ValueError(f"tolerance must be finite and above 0, got {tolerance}")
        object.__setattr__(self, "tolerance", tolerance)

    def forward(
        self, comm: Comm, call: ResolvedCall, q: Tensor, k: Tensor, v: Tensor
    ) -> ForwardResult:
        plan = self.task_plan(call)
        exchange = TaskExchange(comm, plan, "disaggregated forward", [[q]], [k, v])
        total, arrived = Partial.nothing(q, v), _split(exchange.keys, k, v)
        attend(q, k, v, plan.first, total, call.options)
        returning = list[Returning]()
        for stage, (guests,) in exchange.arrivals():
            results = _serve(guests, [(k, v), arrived], stage, call, total)
            returning.append(exchange.return_results(stage, results))
            del guests, results
            coming, values = (x[:, stage.key_rows] for x in arrived)
            attend(q, coming, values, stage.own, total, call.options)
            del coming, values
        kept = [*exchange.guests, exchange.keys] if self.keep == "server" else []
        del exchange, arrived
        attend(q, k, v, plan.last, total, call.options)
        for each in returning:
            for sent, results in each.wait():
                total.merge(sent.local(q.device), *_out_and_lse(results, q.shape[2]))
        out, lse = total.finish(call.sinks, q.dtype)
        return ForwardResult(out, lse, kept)

    def backward(
        self,
        comm: Comm,
        call: ResolvedCall,
        dout: Tensor,
        dlse: Tensor | None,
        residuals: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse, *kept = residuals
        output = OutputGradient.of(dout, dlse, out, lse, call.sinks)
        return self._gradients(comm, call, output, q, k, v, kept)

    def gradients(
        self,
        comm: Comm,
        call: ResolvedCall,
        output: OutputGradient,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._gradients(comm, call, output, q, k, v, [])

    def _gradients(
        self,
        comm: Comm,
        call: ResolvedCall,
        output: OutputGradient,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kept: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        plan, dlse = self.task_plan(call), call.dlse_on_all_ranks(output.dlse, output.dout)
        columns = [output.lse, output.ensure_delta(), *([] if dlse is None else [dlse])]
        rows = [output.dout] if kept else [output.dout, q]
        exchange = TaskExchange(
            comm,
            plan,
            "disaggregated backward",
            [rows, [torch.stack(columns, -1)]],
            [k, v],
            kept[1] if kept else None,
        )
        total, arrived = Gradients.zeros(q, k, v), _split(exchange.keys, k, v)
        attend_backward(output, q, k, v, plan.first, total, call.options)
        of_keys = total.dk.new_zeros(exchange.keys.shape)
        blocks = [(k, v, total.dk, total.dv), (*arrived, *_split(of_keys, k, v))]
        returning, returning_keys = list[Returning](), list[Returning]()
        for stage, (guests, statistics) in exchange.arrivals():
            queries = kept[0][stage.queries.rows].transpose(0, 1) if kept else None
            results = _serve_backward(queries, guests, statistics, blocks, stage, call)
            returning.append(exchange.return_results(stage, results))
            del queries, guests, statistics, results
            coming, values, dk, dv = (x[:, stage.key_rows] for x in blocks[1])
            into = Gradients(total.dq, dk, dv)
            attend_backward(output, q, coming, values, stage.own, into, call.options)
            returning_keys.append(exchange.return_gradients(stage, of_keys))
            del coming, values, dk, dv, into
        del exchange, arrived, of_keys, blocks
        attend_backward(output, q, k, v, plan.last, total, call.options)
        for each in returning:
            for sent, results in each.wait():
                sent.add(results, total.dq)
        for each in returning_keys:
            for sent, results in each.wait():
                sent.add(results, total.dk, total.dv)
        return total.dq, total.dk, total.dv

    def check(self, call: ResolvedCall) -> None:
        self.task_rows(call)

    def task_plan(self, call: ResolvedCall) -> TaskPlan:
        """Return what the call's rank sends, computes and returns."""
        key = "task plan", self.plan, self.tolerance
        return call.once(key, lambda: TaskPlan.of(call, self.task_rows(call)))

    def task_rows(self, call: ResolvedCall) -> TaskRows:
        """Return what travels for the plan's tasks, on all ranks."""

        def build() -> TaskRows:
            geometry = call.layout, call.kv_layout, call.mask
            if self.plan is None:
                tasks = _own_tasks(call, self.tolerance)
            else:
                tasks = self.plan.tasks(*geometry)
            return TaskRows(tasks, *geometry, max(1, _ROWS // max(1, call.shape.batch)))

        return call.once(("task rows", self.plan, self.tolerance), build)

    def areas(self, call: ResolvedCall, rank: int) -> list[int]:
        parts = self.task_rows(call).of_server(rank)
        return [int(parts.areas().sum()) * call.shape.heads]

    def traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        return list(task_traffic(call, self.task_rows(call), rank, self.keep == "server"))

    def empty_residuals(
        self, comm: Comm, q: Tensor, k: Tensor, v: Tensor, tokens: int, kv_tokens: int
    ) -> list[Tensor]:
        if self.keep == "home":
            return []
        sizes = torch.library.get_ctx()  # how many rows come depends on the layout
        guests, keys = sizes.new_dynamic_size(), sizes.new_dynamic_size()
        batch, _, heads, dim = k.shape
        return [
            q.new_empty((guests, batch, *q.shape[2:])),
            k.new_empty((keys, batch, heads, dim + v.shape[3])),
        ]


def _serve(
    guests: Tensor,
    blocks: list[tuple[Tensor, Tensor]],
    stage: Stage,
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
        attend_blocks(guests, blocks, stage.blocks, call.options, None, into)
    return results


def _serve_backward(
    q: Tensor | None,
    guests: Tensor,
    statistics: Tensor,
    blocks: list[tuple[Tensor, Tensor, Tensor, Tensor]],
    stage: Stage,
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
        into = Gradients(dq.transpose(0, 1), dk, dv)
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


def _own_tasks(call: ResolvedCall, tolerance: float) -> Tasks:
    """Return the tasks of the strategy's own planner, by the costs of an H100.

    They balance as well on another device as its times are in the same proportion. All ranks make
    the same tasks, and nothing is sent to agree.
    """
    s = call.shape
    heads, kv_heads = max(1, s.heads), max(1, s.kv_heads)  # some ranks of a mesh have none
    model = Model("", (Layer("softmax", None, 0, 0),), s.dim, heads, kv_heads, s.dim, 1)
    nodes = -(-call.ranks // 8)
    cluster = Cluster.preset(f"{nodes}x{min(call.ranks, 8)}-h100")
    return disaggregate(
        call.layout,
        call.mask,
        Costs(cluster, model),
        row_bytes=RowBytes.of(heads, kv_heads, s.dim, s.value_dim, s.dtype.itemsize),
        kv_layout=call.kv_layout,
        tolerance=tolerance,
    )


@register
class DisaggregatedAttention(Attention):
    """Softmax attention whose tasks are computed by whoever has time for them."""

    strategy = Disaggregated

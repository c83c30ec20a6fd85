"""Disaggregated attention: a plan decides, task by task, which rank computes what.

Zhuang et al., "Efficient Long-context Language Model Training by Core Attention Disaggregation"
(2025), sections 3 and 4: a task is some queries and the keys that they see, and any rank may serve
it. Servers are in place: every rank is home of its tokens and serves tasks, its own and others'.
Unlike in the paper keys of a task may be split, since partials merge at home; dispatch hides under
the work that stays at home, even with one batch; and results return stage by stage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from seqpar.attention.module import make_strategy
from seqpar.balance.disaggregation.disaggregate import disaggregate
from seqpar.balance.disaggregation.row_bytes import RowBytes
from seqpar.comm.messages.exchange import Comm, Group
from seqpar.comm.routing.routing import Routing
from seqpar.core.arguments import Deterministic, as_float, shown
from seqpar.core.traffic import Traffic
from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.layers import Layer
from seqpar.costs.model import Model
from seqpar.layout.tasks.task_rows import TaskRows
from seqpar.layout.tasks.tasks import TaskRectangles
from seqpar.servers.pool.pool import ServerPool
from seqpar.servers.strategy import OnServers
from seqpar.softmax.call import Operands, ResolvedCall
from seqpar.softmax.compute.partial import OutputGradient
from seqpar.softmax.module import COMMON_OPTIONS
from seqpar.softmax.strategy import ForwardResult, Gradients
from seqpar.softmax.tasks.exchange import TaskExchange
from seqpar.softmax.tasks.plan import TaskPlan
from seqpar.softmax.tasks.planner import Planner
from seqpar.softmax.tasks.split_module import SplitAttention
from seqpar.softmax.tasks.split_strategy import SplitStrategy
from seqpar.softmax.tasks.task_attention import (
    complete_backward,
    complete_forward,
    post_backward,
    post_forward,
)
from seqpar.softmax.tasks.traffic import task_traffic
from seqpar.strategies.registry import register

# A stage has at most so many rows of others, if there are not too many for the stages.
_ROWS = 512


@dataclass(frozen=True)
class Disaggregated(SplitStrategy[TaskExchange]):
    """Queries and keys travel to whoever computes with them, and results return."""

    name = "disaggregated"
    plan: Any = None  # who computes what: None (its own planner's), Tasks, or what makes them
    backward_plan: Any = None  # who does in backward; None: the same
    keep: str = "home"  # who keeps what a server was sent, for backward
    tolerance: float = 0.05  # by how much the slowest rank of its own plan may exceed the mean

    def __post_init__(self) -> None:
        for name in ("plan", "backward_plan"):
            if (plan := getattr(self, name)) is not None:
                object.__setattr__(self, name, Planner.of(name, plan))
        if not isinstance(self.keep, str) or self.keep not in ("home", "server"):
            raise ValueError(f'keep must be "home" or "server", got {shown(self.keep)}')
        if self.backward_plan is not None and self.keep == "server":
            reason = "servers keep what forward's plan sent them"
            raise ValueError(f'backward_plan must be None with keep="server": {reason}')
        tolerance = as_float("tolerance", self.tolerance)
        if not 0 < tolerance < math.inf:
            raise ValueError(f"tolerance must be finite and above 0, got {tolerance}")
        object.__setattr__(self, "tolerance", tolerance)

    def post(self, comm: Comm, call: ResolvedCall, operands: Operands) -> TaskExchange:
        plan, label = self.task_plan(call, "forward"), "disaggregated forward"
        return post_forward(comm, plan, label, operands)

    def complete(
        self, posted: TaskExchange, call: ResolvedCall, operands: Operands
    ) -> ForwardResult:
        return complete_forward(posted, call, operands, keep=self.keep == "server")

    def post_gradients(
        self,
        comm: Comm,
        call: ResolvedCall,
        output: OutputGradient,
        operands: Operands,
        residuals: list[Tensor],
    ) -> TaskExchange:
        plan, label = self.task_plan(call, "backward"), "disaggregated backward"
        return post_backward(comm, call, plan, label, output, operands, residuals)

    def complete_gradients(
        self,
        posted: TaskExchange,
        call: ResolvedCall,
        output: OutputGradient,
        operands: Operands,
        residuals: list[Tensor],
    ) -> Gradients:
        return complete_backward(posted, call, output, operands, residuals)

    def check(self, call: ResolvedCall) -> None:
        for direction in ("forward", "backward"):
            self.task_rows(call, direction)

    def agreed(self, call: ResolvedCall) -> dict[str, object]:
        passes = {"plan": "forward", "backward_plan": "backward"}
        return {name: self.task_rows(call, direction).digest for name, direction in passes.items()}

    def task_plan(self, call: ResolvedCall, direction: str) -> TaskPlan:
        """Return what the call's rank sends, computes and returns in a pass."""
        key = "task plan", *self._chosen(direction)
        return call.once(key, lambda: TaskPlan.of(call, self.task_rows(call, direction)))

    def task_rows(self, call: ResolvedCall, direction: str) -> TaskRows:
        """Return what travels for a pass's tasks, on all ranks."""
        name, plan, tolerance = self._chosen(direction)

        def build() -> TaskRows:
            geometry = call.layout, call.kv_layout, call.mask
            tasks = _own_tasks(call, tolerance) if plan is None else plan.tasks(name, *geometry)
            return TaskRows(tasks, *geometry, max(1, _ROWS // max(1, call.shape.batch)))

        return call.once(("task rows", name, plan, tolerance), build)

    def _chosen(self, direction: str) -> tuple[str, Any, float]:
        """Return the option that says who computes a pass, what it is, and the tolerance."""
        name = "plan"
        if direction == "backward" and self.backward_plan is not None:
            name = "backward_plan"
        return name, getattr(self, name), self.tolerance

    def areas(self, call: ResolvedCall, rank: int) -> list[int]:
        return self._areas(call, rank, "forward")

    def backward_areas(self, call: ResolvedCall, rank: int) -> list[int]:
        return self._areas(call, rank, "backward")

    def _areas(self, call: ResolvedCall, rank: int, direction: str) -> list[int]:
        parts = self.task_rows(call, direction).of_server(rank)
        return [int(parts.areas().sum()) * call.shape.heads]

    def traffic(self, call: ResolvedCall, rank: int) -> list[Traffic]:
        found = list[Traffic]()
        for direction in ("forward", "backward"):
            rows = self.task_rows(call, direction)
            found += task_traffic(call, rows, direction, rank, self.keep == "server")
        return found

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


def _own_tasks(call: ResolvedCall, tolerance: float) -> TaskRectangles:
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
        row_bytes=RowBytes.sent(heads, kv_heads, s.dim, s.value_dim, s.dtype.itemsize),
        kv_layout=call.kv_layout,
        tolerance=tolerance,
    )


@register
class DisaggregatedAttention(SplitAttention):
    """Softmax attention cut into tasks, each of which a plan gives to some rank.

    A task is some queries of a document and some of its keys, of which it has the visible pairs.
    In place, on a group, every rank is home of its tokens, and server of tasks. On a `ServerPool`
    this process is home of all tokens, so layouts are of one rank, and the pool's servers compute.
    See `Attention` for the call, which all strategies share.

    Args:
        group: a process group, a 1-D DeviceMesh, or a `ServerPool`.
        check_ranks, deterministic, routing: as in `Attention`; a pool has nothing to route.
        plan: who computes what: a `seqpar.layout.tasks.tasks.TaskRectangles`, or a function of the
            geometries of queries and of keys and of the mask that returns one, the same on all
            ranks. Each visible pair must be in just one task; else a call raises a ValueError
            before anything is sent. By default `seqpar.balance.disaggregate` plans, by the costs
            of an H100.
        keep: "home" (the default): backward sends q, k and v to servers again; "server": servers
            keep them.
        backward_plan: who computes what in backward, likewise, if not the same as in forward; only
            with `keep="home"`.
        tolerance: by how much the work of a rank in the default plan may exceed the mean.

    Options on a pool, in place of the last three; the same on all trainers and in all runs whose
    bits are compared, since the tasks of a call follow from them and the call alone:
        tasks: into how many tasks a call is cut, at most, and one more if something is left over.
            More of them are shared more evenly by unequal servers, and cost more bytes.
        tile: query rows that a kernel computes together. A task has a multiple of them, but at the
            end of a document, and the work of at least four squares of them.

    Bytes sent by rank r, with m(r, s) its query rows, and n(r, s) its key rows, that see or are
    seen in a task of server s by the pass's plan, b the bytes of an element, and e = 4 (8 for
    fp64). Sums are over the other ranks s; a row travels to a server once:

    * forward: Σ m(r, s)·B·Hq·D·b and Σ n(r, s)·B·Hkv·(D + Dv)·b to servers, and as a server
      Σ m(s, r)·B·Hq·(Dv + 1)·e of results;
    * backward: Σ m(r, s)·B·Hq·((D + Dv)·b + 2e) (3e if lse has a gradient), the keys again, and as
      a server Σ m(s, r)·B·Hq·D·e of dq and Σ n(s, r)·B·Hkv·(D + Dv)·e of dk and dv, summed over its
      tasks. With `keep="server"` the D·b of queries and the keys do not travel.

    Messages: in each stage to a server one of queries (in backward q and dout are one, and the
    statistics one), one of keys, and back one of results; keys that guests of several stages see
    are apart from the others, since their gradients return later. `traffic` says how many.

    Memory beside inputs and results, in bytes, where m rows of queries and n of keys come to a rank
    and m' rows of its queries leave: in forward the partial B·T·Hq·(4·Dv + 8), what comes,
    B·(m·Hq·D + n·Hkv·(D + Dv))·b, and results, (m + m')·B·Hq·(Dv + 1)·4; in backward dq, dk and dv,
    what comes, its gradients, (m + m')·B·Hq·D·4 + n·B·Hkv·(D + Dv)·4, and those of its own keys
    that return. With `keep="server"` what comes stays until backward, in place of nothing.

    Gradients of keys are added at their owner in the order of stages and servers, so the same plan
    gives the same bits.

    Bytes to and from a pool, summed over the tasks i of a call: with m(i) query rows, n(i) key rows
    and s(i) slices

    * forward: m(i)·B·Hq·D·b + n(i)·B·Hkv·(D + Dv)·b and tables of 48·s(i) + 4·(m(i) + n(i)) to the
      server, and m(i)·B·Hq·(Dv + 1)·e of results back, or, if no other task has any of its query
      rows and there are no sinks, m(i)·B·Hq·(Dv·b + e);
    * backward: m(i)·B·Hq·((D + Dv)·b + 2e) (3e if lse has a gradient), the keys and tables again,
      and m(i)·B·Hq·D·e + n(i)·B·Hkv·(D + Dv)·e of gradients back.

    `traffic` has a row for each task, as a step, to the peer −1: whichever server. `sent_bytes`
    counts a task once, however often it had to be sent. Memory beside inputs and results: what is
    sent, until it is answered, the results that have come, and the partial or fp32 gradients above.
    Results are merged and gradients summed in the order of the tasks, so a step has the same bits
    whichever servers there are, if they are of one kind. A call raises a `ServersError` if the pool
    is closed, or if its servers, and home, have not computed a task when its deadlines are over.

    Zhuang et al., "Efficient Long-context Language Model Training by Core Attention Disaggregation"
    (2025), sections 3 and 4.
    """

    strategy = Disaggregated

    def __init__(
        self,
        group: Group | ServerPool,
        check_ranks: bool = False,
        deterministic: Deterministic = True,
        *,
        routing: Routing | None = None,
        **options: object,
    ) -> None:
        if not isinstance(group, ServerPool):
            super().__init__(group, check_ranks, deterministic, routing=routing, **options)
            return
        strategy = replace(make_strategy(OnServers, options, COMMON_OPTIONS), pool=group)
        self._bind(strategy, group.comm, check_ranks, deterministic, routing)

    def extra_repr(self) -> str:
        """Return what the module's representation says beside its name."""
        strategy = self._bound.strategy
        if isinstance(strategy, OnServers):
            return f"{strategy.pool}, tasks={strategy.tasks}, tile={strategy.tile}"
        return super().extra_repr()

"""Disaggregated attention: a plan assigns each task to a rank, or to an attention server.

To the loop `disaggregated` of docs/internals/in_300_lines.md, this strategy adds a plan that
balances the work, messages that carry each row to a server only once, and separate servers.

Zhuang et al., "Efficient Long-context Language Model Training by Core Attention Disaggregation"
(2025), sections 3 and 4. Unlike there, the keys of a task may be split, because partials merge at
the owner of the queries; local work hides the messages even with one batch; and results return
stage by stage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from seqpar.attention.module import make_strategy
from seqpar.balance.disaggregation.disaggregate import disaggregate
from seqpar.balance.disaggregation.row_bytes import RowBytes
from seqpar.comm.messages.comm import Comm, Group
from seqpar.comm.routing.routing import Routing
from seqpar.core.arguments import Deterministic, as_float, shown
from seqpar.core.traffic import Traffic
from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.model import Layer, Model
from seqpar.layout.tasks.task_rows import TaskRows
from seqpar.layout.tasks.tasks import TaskRectangles
from seqpar.servers.pool.pool import ServerPool
from seqpar.servers.server_strategy import OnServers
from seqpar.softmax.call import Operands, ResolvedCall
from seqpar.softmax.compute.partial import OutputGradient
from seqpar.softmax.keys.key_plan import HeadSlices, head_groups
from seqpar.softmax.module import COMMON_OPTIONS
from seqpar.softmax.strategy import ForwardResult
from seqpar.softmax.tasks.split import SplitAttention, SplitStrategy
from seqpar.softmax.tasks.task_attention import (
    GroupExchanges,
    TaskBuffers,
    TaskExchange,
    complete_backward,
    complete_forward,
)
from seqpar.softmax.tasks.task_plan import Planner, Plans, TaskPlan, task_traffic
from seqpar.strategies.registry import register

# A stage has about this many foreign rows, or more if the largest number of stages is reached.
_ROWS_PER_STAGE = 512


@dataclass(frozen=True)
class Disaggregated(SplitStrategy[TaskExchange, GroupExchanges]):
    """Queries and keys travel to the servers of their tasks, and results return."""

    name = "disaggregated"
    # Tasks, or a function that makes them. None: the default planner; in backward, as in forward.
    plan: TaskRectangles | Plans | Planner | None = None
    backward_plan: TaskRectangles | Plans | Planner | None = None
    keep: str = "home"  # "server" if servers keep the rows that they receive until backward
    tolerance: float = 0.05  # the slowest rank's allowed excess over the mean, in the default plan

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
        s = call.shape
        keys = s.batch * s.kv_heads * (s.dim + s.value_dim)
        buffers = TaskBuffers.of(plan, 1, 1, [s.batch * s.heads * s.dim], keys)
        return TaskExchange(comm, plan, label, [[operands.q]], [operands.k, operands.v], buffers)

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
        at_once: bool,
    ) -> GroupExchanges:
        plan, label = self.task_plan(call, "backward"), "disaggregated backward"
        dlse = call.dlse_on_all_ranks(output.dlse, output.dout)
        columns = [output.lse, output.ensure_delta(), *([] if dlse is None else [dlse])]
        groups, s = self._groups(call, "backward"), call.shape
        kv_heads = s.batch * -(-s.kv_heads // len(groups))  # in the largest group, for all entries
        heads = kv_heads * (s.heads // max(1, s.kv_heads))
        queries = heads * (s.value_dim + (0 if residuals else s.dim)), heads * len(columns)
        live = len(groups) if at_once else 1
        keys = kv_heads * (s.dim + s.value_dim)
        buffers = TaskBuffers.of(plan, len(groups), live, queries, keys)

        def post(heads: HeadSlices) -> TaskExchange:
            q, k, v, _ = heads.operands(operands)
            dout, *statistics = (x[:, :, heads.queries] for x in (output.dout, *columns))
            # The blocks that servers kept in forward do not travel again.
            rows = [dout] if residuals else [dout, q]
            kept = residuals[1][:, :, heads.keys] if residuals else None
            moving = [rows, [torch.stack(statistics, -1)]]
            return TaskExchange(comm, plan, label, moving, [k, v], buffers, kept)

        return GroupExchanges(groups, post, at_once)

    complete_gradients = staticmethod(complete_backward)

    def check(self, call: ResolvedCall) -> None:
        for direction in ("forward", "backward"):
            self.task_rows(call, direction)

    def agreed(self, call: ResolvedCall) -> dict[str, object]:
        return {
            "plan": self.task_rows(call, "forward").described,
            "backward_plan": self.task_rows(call, "backward").described,
        }

    def task_plan(self, call: ResolvedCall, direction: str) -> TaskPlan:
        key = "task plan", *self._chosen(direction)
        return call.once(key, lambda: TaskPlan.of(call, self.task_rows(call, direction)))

    def task_rows(self, call: ResolvedCall, direction: str) -> TaskRows:
        name, plan, tolerance = self._chosen(direction)

        def build() -> TaskRows:
            geometry = call.layout, call.kv_layout, call.mask
            tasks = _own_tasks(call, tolerance) if plan is None else plan.tasks(name, *geometry)
            return TaskRows(tasks, *geometry, max(1, _ROWS_PER_STAGE // max(1, call.shape.batch)))

        # A user's function may differ between ranks, which the check of ranks then finds.
        once = call.once_for_ranks if plan is None else call.once
        return once(("task rows", name, plan, tolerance), build)

    def _chosen(self, direction: str) -> tuple[str, Planner | None, float]:
        name = "plan"
        if direction == "backward" and self.backward_plan is not None:
            name = "backward_plan"
        return name, getattr(self, name), self.tolerance

    def _groups(self, call: ResolvedCall, direction: str) -> list[HeadSlices]:
        """Return the groups in which heads travel, the same on all ranks.

        Forward has one group, because callers may post a forward long before they complete it, so
        that all of its messages are hidden.
        """
        if direction == "backward":
            return head_groups(call.shape, call.layout, call.mask)
        return [HeadSlices(slice(None), slice(None))]

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
            groups = len(self._groups(call, direction))
            found += task_traffic(call, rows, direction, rank, self.keep == "server", groups)
        return found

    def empty_residuals(
        self, comm: Comm, q: Tensor, k: Tensor, v: Tensor, tokens: int, kv_tokens: int
    ) -> list[Tensor]:
        if self.keep == "home":
            return []
        sizes = torch.library.get_ctx()  # the number of foreign rows depends on the layout
        queries, keys = sizes.new_dynamic_size(), sizes.new_dynamic_size()
        batch, _, heads, dim = k.shape
        return [
            q.new_empty((queries, batch, *q.shape[2:])),
            k.new_empty((keys, batch, heads, dim + v.shape[3])),
        ]


def _own_tasks(call: ResolvedCall, tolerance: float) -> TaskRectangles:
    """Made on all ranks without messages; an H100's costs also balance other devices."""
    s = call.shape
    heads, kv_heads = max(1, s.heads), max(1, s.kv_heads)  # ranks of a mesh may have no heads
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
    """Softmax attention cut into tasks, each of which a plan assigns to a rank.

    A task is some queries and some keys of one document, with their visible pairs. On a group,
    every rank owns its tokens, and computes its own and other ranks' tasks. On a `ServerPool`, this
    process owns all tokens, so layouts have one rank, and the pool's servers compute. See
    `Attention` for the call, which all strategies share.

    Args:
        group: a process group, a 1-D DeviceMesh, or a `ServerPool`.
        check_ranks, deterministic, routing: as in `Attention`. A pool takes no routing.
        plan: the tasks of each rank, a `seqpar.layout.tasks.tasks.TaskRectangles`, or a function of
            the geometries of queries and of keys and of the mask that returns one, the same on all
            ranks. Each visible pair must be in exactly one task; otherwise a call raises a
            ValueError before it sends anything. By default `seqpar.balance.disaggregate` plans with
            the costs of an H100.
        keep: "home", the default: backward sends q, k and v to the servers again. "server": servers
            keep the rows that they receive until backward.
        backward_plan: another plan for backward, only with `keep="home"`. None: the plan of
            forward.
        tolerance: the relative excess over the mean work that the default plan allows a rank.

    A pool has two options instead of the last four. They must be the same on all trainers, and in
    all runs whose bits are compared, because a call's tasks follow only from them and the call:
        tasks: the largest number of tasks of a call; one more is made if work is left over. More
            tasks share the work more evenly among unequal servers, and cost more bytes.
        tile: the number of query rows that a kernel computes together. A task has a multiple of
            them, except at the end of a document, and the work of at least four squares of this
            size.

    Bytes sent by rank r. In the plan of a pass, m(r, s) of its query rows and n(r, s) of its key
    rows belong to tasks of server s; b is the bytes of an element, and e = 4 (8 for fp64). Sums are
    over the other ranks s. A row travels to a server once.

    * forward: to servers, Σ m(r, s)·B·Hq·D·b and Σ n(r, s)·B·Hkv·(D + Dv)·b; as a server,
      Σ m(s, r)·B·Hq·(Dv + 1)·e of results;
    * backward: to servers, Σ m(r, s)·B·Hq·((D + Dv)·b + 2e) (3e if lse has a gradient) and the keys
      again; as a server, Σ m(s, r)·B·Hq·D·e of dq, and Σ n(s, r)·B·Hkv·(D + Dv)·e of dk and dv,
      summed over its tasks. With `keep="server"`, the D·b of queries and the keys do not travel.

    Messages: in each stage, a server gets one message of queries (in backward, one of q and dout,
    and one of statistics) and one of keys, and sends one back. Keys that queries of several stages
    attend to travel separately, because their gradients return later. In backward, heads travel in
    g groups, each with its own messages. g follows from the tokens and documents of the queries as
    in `RingAttention`. `traffic` returns the number of messages.

    Memory in addition to inputs and results, in bytes, for a rank that receives m query rows and n
    key rows, sends m' query rows, and sends its key rows n' times:

    * forward: the partial B·T·Hq·(4·Dv + 8), received rows B·(m·Hq·D + n·Hkv·(D + Dv))·b, and
      results (m + m')·B·Hq·(Dv + 1)·4;
    * backward, divided by g: dq, dk and dv in fp32 B·T·(Hq·D + Hkv·(D + Dv))·4, twice the received
      rows B·(m·Hq·(D + Dv) + n·Hkv·(D + Dv))·b, and the gradients that leave and return
      (m + m')·B·Hq·D·4 + (n + n')·B·Hkv·(D + Dv)·4. Received rows count twice because those of
      the next group arrive while a group is computed. With `begin` and `finish`, backward posts
      the messages of all groups before it computes the first group. The received rows and the rows
      that are sent are then not divided by g.

    With `keep="server"`, received rows are also kept from forward to backward.

    Gradients of keys are added at their owner in the order of stages and servers, so the same plan
    gives the same bits.

    Bytes to and from a pool, summed over the tasks i of a call, with m(i) query rows, n(i) key rows
    and s(i) slices:

    * forward: to the server, m(i)·B·Hq·D·b + n(i)·B·Hkv·(D + Dv)·b and tables of
      48·s(i) + 4·(m(i) + n(i)); results of m(i)·B·Hq·(Dv + 1)·e return, or, if no other task has
      any of its query rows and the call has no sinks, m(i)·B·Hq·(Dv·b + e);
    * backward: to the server, m(i)·B·Hq·((D + Dv)·b + 2e) (3e if lse has a gradient), and the keys
      and tables again; gradients of m(i)·B·Hq·D·e + n(i)·B·Hkv·(D + Dv)·e return.

    `traffic` has a row per task, with the task as the step and −1, any server, as the peer.
    `sent_bytes` counts a task once, even if it was sent several times. Memory in addition to inputs
    and results: requests until they are answered, results that have arrived, and the partial or
    fp32 gradients above. Results are merged, and gradients summed, in the order of the tasks, so a
    step has the same bits with any servers of one kind. A call raises a `ServersError` if the pool
    is closed, or if neither its servers nor this process have computed a task within its deadlines.

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
        strategy = make_strategy(OnServers, options, COMMON_OPTIONS, self.forward)
        strategy = replace(strategy, pool=group)
        self._bind(strategy, group.comm, check_ranks, deterministic, routing)

    def extra_repr(self) -> str:
        strategy = self._bound.strategy
        if isinstance(strategy, OnServers):
            return f"{strategy.pool}, tasks={strategy.tasks}, tile={strategy.tile}"
        return super().extra_repr()

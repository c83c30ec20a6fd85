"""Disaggregated attention: a plan assigns each task to a rank, or to an attention server.

A *task* is the attention of some queries over some keys of one document. The *server* of a task is
the rank or process that computes the task. The loop `disaggregated` of
docs/internals/in_300_lines.md shows the idea. Unlike the loop, this strategy makes a plan that
balances the work, sends each row to a server only once, and can use separate server processes. The
code of messages and computation is in `seqpar/softmax/tasks/`.

The method is from Zhuang et al., "Efficient Long-context Language Model Training by Core Attention
Disaggregation" (2025), sections 3 and 4, with three differences. The keys of one query may belong
to several tasks, because the rank of the query merges the results of its tasks. A rank computes
with its own keys while messages are sent, so messages are hidden even in a single batch. Results
are returned in stages.
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
from seqpar.softmax.keys.key_plan import HeadSlices, divided_heads
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

# In a stage, a server receives about this number of rows from other ranks. Stages are larger if
# there would be too many of them otherwise.
_ROWS_PER_STAGE = 512
# In backward, heads are divided into one group for each of this number of query rows on a rank. The
# lengths of documents do not matter: most of the memory is for gradients of foreign keys, and a
# token needs as much of it in a short document as in a long one.
_ROWS_PER_GROUP = 4096


@dataclass(frozen=True)
class Disaggregated(SplitStrategy[TaskExchange, GroupExchanges]):
    """The strategy that sends queries and keys to the ranks that compute their tasks.

    The results return to the ranks that hold the queries.
    """

    name = "disaggregated"
    # The tasks, or a function that makes them. In forward, None means the default plan. In
    # backward, None means the plan of forward.
    plan: TaskRectangles | Plans | Planner | None = None
    backward_plan: TaskRectangles | Plans | Planner | None = None
    # With "server", a rank keeps rows of other ranks from forward to backward. With "home", it does
    # not.
    keep: str = "home"
    # In the default plan, the work of the slowest rank may exceed the mean by this fraction of the
    # mean.
    tolerance: float = 0.05

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
        buffers = TaskBuffers.of(plan, 1, [s.batch * s.heads * s.dim], keys)
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
        # For all batch entries, in the largest group.
        kv_heads = s.batch * -(-s.kv_heads // len(groups))
        heads = kv_heads * (s.heads // max(1, s.kv_heads))
        queries = heads * (s.value_dim + (0 if residuals else s.dim)), heads * len(columns)
        keys = kv_heads * (s.dim + s.value_dim)
        # With `at_once`, the rows of the second group arrive before those of the first are freed.
        apart = 1 if at_once else 0
        first, later = (
            TaskBuffers.of(plan, x, queries, keys) for x in (apart, len(groups) - apart)
        )

        def post(heads: HeadSlices) -> TaskExchange:
            buffers = first if at_once and heads is groups[0] else later
            q, k, v, _ = heads.operands(operands)
            dout, *statistics = (x[:, :, heads.queries] for x in (output.dout, *columns))
            # q and k are not sent again if servers kept them in forward.
            rows = [dout] if residuals else [dout, q]
            kept = residuals[1][:, :, heads.keys] if residuals else None
            moving = [rows, [torch.stack(statistics, -1)]]
            return TaskExchange(comm, plan, label, moving, [k, v], buffers, kept)

        return GroupExchanges(groups, post, ahead=2 if at_once else 1)

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

        # A user's function may return different tasks on different ranks, so the tasks of each rank
        # must be compared.
        once = call.once_for_ranks if plan is None else call.once
        return once(("task rows", name, plan, tolerance), build)

    def _chosen(self, direction: str) -> tuple[str, Planner | None, float]:
        name = "plan"
        if direction == "backward" and self.backward_plan is not None:
            name = "backward_plan"
        return name, getattr(self, name), self.tolerance

    def _groups(self, call: ResolvedCall, direction: str) -> list[HeadSlices]:
        """Return the groups of heads that are sent and computed one after another.

        All ranks have the same groups. Forward has a single group.
        """
        if direction == "backward":
            rows = call.layout.worst_case.most_tokens * call.shape.batch
            return divided_heads(call.shape, rows // _ROWS_PER_GROUP)
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
        sizes = torch.library.get_ctx()  # the number of rows from other ranks depends on the layout
        queries, keys = sizes.new_dynamic_size(), sizes.new_dynamic_size()
        batch, _, heads, dim = k.shape
        return [
            q.new_empty((queries, batch, *q.shape[2:])),
            k.new_empty((keys, batch, heads, dim + v.shape[3])),
        ]


def _own_tasks(call: ResolvedCall, tolerance: float) -> TaskRectangles:
    """Return the tasks into which a call is cut if the user gives no plan, and their ranks.

    A *task* is attention of some queries over some keys of one document, which one rank computes.
    Every rank makes the same plan, without messages. The plan estimates times with the costs of an
    H100.
    """
    s = call.shape
    heads, kv_heads = max(1, s.heads), max(1, s.kv_heads)  # in a mesh, a rank may have no heads
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
    """Softmax attention that is cut into tasks, which a plan assigns to ranks.

    A *task* is attention of some queries over some keys of one document, for the pairs that the
    mask allows. The rank that holds a token is the *owner* of the token. The rank that computes a
    task is the *server* of the task. On a group, every rank is an owner and a server. On a
    `ServerPool`, the processes of the pool are the servers, and this process owns all tokens.
    Layouts for a `ServerPool` have one rank. See `Attention` for the call, which all strategies
    share.

    Args:
        group: a process group, a 1-D DeviceMesh, or a `ServerPool`.
        check_ranks, deterministic, routing: as in `Attention`. With a pool, routing must be None.
        plan: the tasks and their servers, as a `seqpar.layout.tasks.tasks.TaskRectangles`, or a
            function that returns one. The function is called with the geometry of the queries, the
            geometry of the keys, and the mask. The function must return the same tasks on all
            ranks. If a pair that the mask allows is in no task or in several tasks, a call raises a
            ValueError before it sends anything. By default `seqpar.balance.disaggregate` makes the
            plan, with the costs of an H100.
        keep: with "home", the default, backward sends q, k and v to the servers again. With
            "server", servers keep the rows that they received until backward.
        backward_plan: a plan for backward, which requires `keep="home"`. None means the plan of
            forward.
        tolerance: an option of the default plan. The work of the slowest rank may exceed the mean
            work of all ranks by this fraction of the mean.

    With a pool, the options are `tasks` and `tile` instead of the last four options. Both options
    must be the same on all trainers, and in all runs whose bits are compared.
        tasks: the largest number of tasks of a call. One more task is made if some work is left
            over. With more tasks, servers of different speeds share the work more evenly, but more
            bytes are sent.
        tile: the number of query rows that a kernel computes together. The number of query rows of
            a task is a multiple of `tile`, except at the end of a document. The work of a task is
            at least the work of four squares of `tile` queries and `tile` keys.

    Bytes sent by rank r. The plan assigns tasks with m(r, s) query rows and n(r, s) key rows of
    rank r to the server s. A row is sent to a server only once. b is the number of bytes of an
    element, and e is 4 (8 for fp64). f is 2e, or 3e if lse has a gradient. Sums are over all other
    ranks s.

    * forward, to servers: Σ m(r, s)·B·Hq·D·b for queries, and Σ n(r, s)·B·Hkv·(D + Dv)·b for keys
      and values;
    * forward, as a server: Σ m(s, r)·B·Hq·(Dv + 1)·e for results;
    * backward, to servers: Σ m(r, s)·B·Hq·((D + Dv)·b + f) for queries, and keys and values again.
      With `keep="server"`, keys and values, and the part D·b of queries, are not sent again;
    * backward, as a server: Σ m(s, r)·B·Hq·D·e for dq, and Σ n(s, r)·B·Hkv·(D + Dv)·e for dk and
      dv, each summed over the tasks of the server.

    Messages: in each stage, a server receives one message with queries and one message with keys,
    and returns one message with results. In backward, a server receives two messages with queries.
    The first message has q and dout, and the second message has lse and the other statistics. If
    queries of several stages attend to one key, this key is sent in a separate message, because the
    gradient of the key returns later. In backward, heads are sent in g groups, and each group has
    its own messages. There is one group for each 4,096 query rows of the rank with the most rows,
    but at most one per KV head. `traffic` returns the number of messages.

    Memory in addition to inputs and results, in bytes. A rank receives m query rows and n key rows
    of other ranks. It sends m' of its query rows. It sends its key rows n' times in total.

    * forward: the partial B·T·Hq·(4·Dv + 8), received rows B·(m·Hq·D + n·Hkv·(D + Dv))·b, and
      results (m + m')·B·Hq·(Dv + 1)·4;
    * backward, divided by g: dq, dk and dv in fp32 B·T·(Hq·D + Hkv·(D + Dv))·4, twice the received
      rows B·(m·Hq·(D + Dv) + n·Hkv·(D + Dv))·b, and the gradients that leave and return (m +
      m')·B·Hq·D·4 + (n + n')·B·Hkv·(D + Dv)·4.

    In backward, received rows count twice, because the rows of the next group arrive while a group
    is computed. With `begin` and `finish`, backward posts the messages of two groups before it
    computes the first one. With `keep="server"`, received rows are also kept from forward to
    backward.

    The rank that owns a key adds the key's gradients in the order of stages and servers. Two calls
    with the same plan therefore have the same bits.

    Bytes to and from a pool, summed over the tasks i of a call. Task i has m(i) query rows and n(i)
    key rows. The mask cuts task i into s(i) slices, each of which has a range of query rows and a
    range of key rows.

    * forward, to the server: m(i)·B·Hq·D·b + n(i)·B·Hkv·(D + Dv)·b, and tables of 48·s(i) + 4·(m(i)
      + n(i));
    * forward, from the server: m(i)·B·Hq·(Dv + 1)·e. If no other task has any of these query rows
      and the call has no sinks, it is m(i)·B·Hq·(Dv·b + e);
    * backward, to the server: m(i)·B·Hq·((D + Dv)·b + f), and the keys, values and tables again;
    * backward, from the server: m(i)·B·Hq·D·e + n(i)·B·Hkv·(D + Dv)·e.

    `traffic` has a row for each task. The step of the row is the index of the task. The peer is −1,
    because any server may compute the task. `sent_bytes` counts the bytes of a task once, even if
    the task was sent several times. In addition to inputs and results, memory holds requests until
    they are answered, results that have arrived, and the partial or the fp32 gradients above.
    Results are merged in the order of the tasks, and gradients are added in the same order. A
    training step therefore has the same bits with any servers of the same hardware. A call raises a
    `ServersError` if the pool is closed, or if neither a server nor this process has computed a
    task within the deadlines.

    The method is from Zhuang et al., "Efficient Long-context Language Model Training by Core
    Attention Disaggregation" (2025), sections 3 and 4.
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

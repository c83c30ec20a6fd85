"""USP: ranks exchange heads within rows of a mesh, and run a second strategy within columns.

The second strategy is Ring, for example. The loop `ulysses` of docs/internals/in_300_lines.md shows
the exchange of heads. After this exchange, the ranks of a column have the same heads of different
tokens. The second strategy computes attention of these heads among the ranks of the column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from seqpar.attention.module import make_strategy
from seqpar.comm.messages.comm import Comm, Group
from seqpar.comm.routing.routing import Routing
from seqpar.core.arguments import Deterministic, shown
from seqpar.softmax.module import Attention
from seqpar.strategies.registry import SOFTMAX, register
from seqpar.strategies.ulysses import Ulysses


@dataclass(frozen=True)
class USP(Ulysses):
    """The strategy that exchanges heads within rows of ranks, and runs a second strategy in
    columns.
    """

    name = "usp"


@register
class USPAttention(Attention):
    """Softmax attention on a 2-D mesh: heads move within rows, and `outer` runs between rows.

    The mesh has O rows of I ranks. The ranks of a row (mesh dimension 1) exchange heads as in
    `UlyssesAttention`. Usually they are the ranks of one node. The strategy `outer` runs between
    the rows (mesh dimension 0). One layout covers all ranks in row-major order: rank o·I + i is at
    (o, i) in the mesh. The numbers of query heads and KV heads need not be multiples of I. See
    `Attention` for the call, which all strategies share.

    Args:
        mesh: a 2-D DeviceMesh. The first module on a mesh makes a process group. If the mesh is a
            part of a larger mesh, such as `mesh["o", "i"]`, all ranks of the larger mesh must
            therefore make this module at the same point of their programs.
        outer: "ring", "all_gather", "token_ring", "mesh" (on the mesh of the O ranks that sends the
            fewest bytes) or "disaggregated" (on a group, without servers).
        check_ranks, deterministic, routing: as in `Attention`.
        head_groups, keep: as in `UlyssesAttention`.
        outer_options: the options of the strategy `outer`.

    Rank (o, i) is in row o and column i. Within its row, it sends as many bytes as
    `UlyssesAttention` sends on I ranks. Within its column, it sends as many bytes as the strategy
    `outer` sends on O ranks, where each rank has all tokens of its row, but only the heads of its
    column. `traffic` returns these numbers. On NCCL, exchanges within rows and exchanges between
    rows use separate communicators.

    Memory: a rank needs the memory of `UlyssesAttention`, and the memory of the strategy `outer`
    for the tokens of its row and the heads of its column.

    The method is from Fang and Zhao, "USP: A Unified Sequence Parallelism Approach for Long Context
    Generative AI" (2024), section 3.
    """

    strategy = USP
    dimensions = 2

    def __init__(
        self,
        mesh: Group,
        outer: str = "ring",
        check_ranks: bool = False,
        deterministic: Deterministic = True,
        *,
        head_groups: int = 2,
        keep: str = "heads",
        routing: Routing | None = None,
        **outer_options: Any,
    ) -> None:
        outers = outer_strategies()
        if not isinstance(outer, str) or outer not in outers:
            raise ValueError(f"outer must be one of {sorted(outers)}, got {shown(outer)}")
        own = ("outer", "head_groups", "keep", "check_ranks", "deterministic", "routing")
        between = make_strategy(outers[outer].strategy, outer_options, own, self.forward)
        comm = Comm.of(mesh)
        usp = USP(head_groups, keep, inner=comm.shape[-1], outer=between)
        self._bind(usp, comm, check_ranks, deterministic, routing)


def outer_strategies() -> dict[str, type[Attention]]:
    """Return the modules whose strategies USP can run in its columns, by name.

    These are the strategies that do not exchange heads.
    """
    return {
        name: module for name, module in SOFTMAX.items() if not issubclass(module.strategy, Ulysses)
    }

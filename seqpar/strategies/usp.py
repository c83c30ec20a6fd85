"""USP: ranks of a row of a mesh exchange heads, and another strategy runs between rows.

To the loop `ulysses` of docs/internals/in_300_lines.md, this strategy adds that a second strategy,
such as Ring, computes the attention of the exchanged heads between the rows.

The code is in `ulysses.py`: Ulysses is a mesh with one row.
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
    """Ranks of a row exchange heads; between rows, the outer strategy moves what it moves."""

    name = "usp"


@register
class USPAttention(Attention):
    """Softmax attention on a 2-D mesh: heads within rows, another strategy between rows.

    The mesh has O rows of I ranks. Ranks of a row (mesh dimension 1, the ranks of one node)
    exchange heads. `outer` runs between the rows (dimension 0). One layout covers all ranks in
    row-major order: rank o·I + i is at (o, i) in the mesh. The numbers of query heads and KV heads
    need not be multiples of I: the rules of `UlyssesAttention` for a group apply to a row. See
    `Attention` for the call, which all strategies share.

    Args:
        mesh: a 2-D DeviceMesh. If it is a part of a larger mesh, such as `mesh["o", "i"]`, all
            ranks of the larger mesh must make the first module on it, at the same point of their
            programs: it makes a group.
        outer: "ring", "all_gather", "token_ring", "mesh" (the O ranks form the mesh that sends
            least) or "disaggregated" (in place).
        check_ranks, deterministic, routing: as in `Attention`.
        head_groups, keep: as in `UlyssesAttention`.
        outer_options: the options of the outer strategy.

    Bytes sent by rank (o, i): the bytes of `UlyssesAttention` with the I ranks of the row as the
    group, and the bytes of the outer strategy with the O ranks (·, i) as the group; each of these
    holds all tokens of its row, but only the heads of i. `traffic` returns these numbers. On NCCL,
    exchanges within rows and exchanges between rows use separate communicators.

    Memory: as in `UlyssesAttention`, for the row's tokens and the heads of i, and as in the outer
    strategy.

    Fang and Zhao, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI"
    (2024), section 3.
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
    """Return the modules that can run between rows: all that do not exchange heads."""
    return {
        name: module for name, module in SOFTMAX.items() if not issubclass(module.strategy, Ulysses)
    }

"""USP: heads are exchanged within the rows of a mesh, and another strategy runs between the rows.

Fang and Zhao, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI" (2024),
section 3. The code is in `ulysses.py`: Ulysses is the case of a mesh with a single row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from seqpar.attention.module import make_strategy
from seqpar.comm.messages.exchange import Comm, Group
from seqpar.comm.routing.routing import Routing
from seqpar.core.arguments import Deterministic, shown
from seqpar.softmax.module import Attention
from seqpar.strategies.registry import SOFTMAX, register
from seqpar.strategies.ulysses import Ulysses


@dataclass(frozen=True)
class USP(Ulysses):
    """Heads are exchanged within a row; between rows moves what the outer strategy moves."""

    name = "usp"


@register
class USPAttention(Attention):
    """Softmax attention on a 2-D mesh.

    The mesh has O rows of I ranks. Heads are exchanged within a row (mesh dimension 1, ranks of one
    node), and `outer`, any strategy on a 1-D group but Ulysses, runs between the rows (dimension
    0). One layout is for all ranks, which count along the rows: rank o·I + i is at (o, i) in the
    mesh. I need not divide the numbers of query heads or KV heads: what UlyssesAttention says of a
    group holds here of a row. See `Attention` for the call, which all strategies share.

    Args:
        mesh: a 2-D DeviceMesh.
        outer: "ring", "all_gather", "token_ring", "mesh", which puts the O ranks on the mesh that
            sends least, or "disaggregated", which keeps at home.
        check_ranks, deterministic, routing: as in `Attention`.
        head_groups, keep: as in UlyssesAttention.
        outer_options: the outer strategy's options.

    Bytes sent by rank (o, i): as UlyssesAttention says, with the I ranks of the row as the group;
    and as the outer strategy says, with the O ranks (·, i) as the group, each of which holds all
    tokens of its row but only i's heads. `traffic` says how many bytes that is. On NCCL exchanges
    within rows and those between rows go through a communicator each.

    Memory: as UlyssesAttention says, of the row's tokens and i's heads, and what the outer strategy
    needs.

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
        between = make_strategy(outers[outer].strategy, outer_options, own)
        comm = Comm.of(mesh)
        usp = USP(head_groups, keep, inner=comm.shape[-1], outer=between)
        self._bind(usp, comm, check_ranks, deterministic, routing)


def outer_strategies() -> dict[str, type[Attention]]:
    """Return the modules whose strategies can run between rows: all that do not exchange heads."""
    return {
        name: module for name, module in SOFTMAX.items() if not issubclass(module.strategy, Ulysses)
    }

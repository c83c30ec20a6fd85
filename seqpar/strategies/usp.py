"""USP: heads are exchanged within the rows of a mesh, and another strategy runs between the rows.

Fang and Zhao, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI" (2024), section 3. What is done
is in `ulysses.py`, of which Ulysses itself is the case of a single row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from seqpar.comm import Comm, Group
from seqpar.strategies.all_gather import AllGatherAttention
from seqpar.strategies.base import Attention
from seqpar.strategies.ring import RingAttention
from seqpar.strategies.token_ring import TokenRingAttention
from seqpar.strategies.ulysses import Ulysses

OUTER: dict[str, type[Attention]] = {
    attention.strategy.name: attention for attention in (AllGatherAttention, RingAttention, TokenRingAttention)
}


@dataclass(frozen=True)
class USP(Ulysses):
    name = "usp"


class USPAttention(Attention):
    __doc__ = (
        (Attention.__doc__ or "").replace("`group` is a process group or a 1-D DeviceMesh.", "`mesh` is a 2-D DeviceMesh.")
        + """
    USP exchanges heads within a row of the mesh (dimension 1, ranks of one node) and runs `outer`, one of "ring",
    "all_gather" and "token_ring", between the rows (dimension 0); `outer_options` are that strategy's, and `head_groups` is
    Ulysses'. The layout is one for all ranks, which count along the rows: rank o·I + i is (o, i). Query heads and KV heads
    need not divide by the row: what UlyssesAttention says of a group holds here of a row.

    Bytes sent by rank (o, i): as UlyssesAttention says, with the I ranks of the row as the group; and what the outer
    strategy says of the O ranks (·, i), each of which holds the tokens of its row but only i's heads. Memory: q, k, v and
    out of the row's tokens for these heads, which are also what is kept for backward, and what the outer strategy needs.

    Fang and Zhao, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI" (2024), section 3.
    """
    )

    strategy = USP
    dimensions = 2

    def __init__(
        self,
        mesh: Group,
        outer: str = "ring",
        check_ranks: bool = False,
        deterministic: bool = True,
        *,
        head_groups: int = 2,
        **outer_options: Any,
    ) -> None:
        if outer not in OUTER:
            raise ValueError(f"outer must be one of {sorted(OUTER)}, got {outer!r}")
        comm = Comm.of(mesh)
        between = OUTER[outer].strategy(**outer_options)
        options = {"head_groups": head_groups, "inner": comm.shape[-1], "outer": between}
        super().__init__(comm, check_ranks, deterministic, **options)

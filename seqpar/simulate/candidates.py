"""The strategies that a search can choose from, with the shapes of their meshes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from seqpar.comm.messages.comm import Comm, as_mesh
from seqpar.core.arguments import shown
from seqpar.costs.cluster import Cluster
from seqpar.softmax.module import Attention
from seqpar.strategies.registry import SOFTMAX

# Strategies that are equally fast are ranked in this order, the simplest first.
STRATEGIES = ("ulysses", "ring", "all_gather", "token_ring", "disaggregated", "mesh", "usp")


class Candidate(NamedTuple):
    """A strategy and, for "mesh" and "usp", the shape of its mesh: (rows, ranks per row)."""

    strategy: str
    mesh: tuple[int, int] | None = None

    def __str__(self) -> str:
        mesh = [] if self.mesh is None else ["x".join(map(str, self.mesh))]
        return " ".join([self.strategy, *mesh])

    def make(self, comm: Comm, **options: Any) -> Attention:
        """Return the strategy's module on a group. If the strategy has a mesh, the ranks of the
        group fill the mesh row by row.
        """
        shape = (comm.size,) if self.mesh is None else self.mesh
        return SOFTMAX[self.strategy](as_mesh(comm, *shape), **options)


def candidates(
    cluster: Cluster, ranks: int, strategies: Sequence[str] = STRATEGIES
) -> list[Candidate]:
    """Return the given strategies, each with all shapes of its mesh that are tried. The simplest
    strategy comes first.

    With the strategy "usp", all ranks in one row of the mesh are in the same node. With the
    strategy "mesh", meshes whose rows are much longer than their columns are left out.
    """
    row = ranks if cluster.nodes == 1 else cluster.devices_per_node
    made = []
    for strategy in STRATEGIES:
        if strategy not in strategies:
            continue
        if SOFTMAX[strategy].dimensions == 1:
            made.append(Candidate(strategy))
            continue
        if strategy == "usp":
            sizes = [n for n in range(2, row + 1) if row % n == 0 and ranks % n == 0 and n < ranks]
        else:
            sizes = [n for n in range(2, ranks) if ranks % n == 0 and n * n <= 2 * ranks]
        made += [Candidate(strategy, (ranks // n, n)) for n in sizes]
    return made


def as_strategies(strategies: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of strategies, by default all. Raises a ValueError for an unknown name."""
    if strategies is None:
        return STRATEGIES
    if isinstance(strategies, str):
        strategies = (strategies,)
    names = tuple(strategies) if isinstance(strategies, Sequence) else ()
    unknown = [name for name in names if not isinstance(name, str) or name not in STRATEGIES]
    if unknown or not names:
        expected = f"some of {sorted(STRATEGIES)}"
        raise ValueError(f"strategies must be {expected}, got {shown(strategies)}")
    return names


def table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(x.ljust(n) for x, n in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)

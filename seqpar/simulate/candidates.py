"""Candidates: the strategies that can be chosen, with their degrees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from seqpar.comm.messages.exchange import Comm
from seqpar.comm.messages.subgroup import as_mesh
from seqpar.core.arguments import shown
from seqpar.costs.cluster import Cluster
from seqpar.softmax.module import Attention
from seqpar.strategies.registry import SOFTMAX

# Strategies, in the order in which equals are ranked: the simplest first.
STRATEGIES = ("ulysses", "ring", "all_gather", "token_ring", "disaggregated", "mesh", "usp")


class Candidate(NamedTuple):
    """A strategy, and of "mesh" and "usp" the mesh: (rows, ranks of a row)."""

    strategy: str
    mesh: tuple[int, int] | None = None

    def __str__(self) -> str:
        mesh = [] if self.mesh is None else ["x".join(map(str, self.mesh))]
        return " ".join([self.strategy, *mesh])

    def make(self, comm: Comm, **options: Any) -> Attention:
        """Return its module on the ranks of a group, which count along the rows of a mesh."""
        shape = (comm.size,) if self.mesh is None else self.mesh
        return SOFTMAX[self.strategy](as_mesh(comm, *shape), **options)


def candidates(
    cluster: Cluster, ranks: int, strategies: Sequence[str] = STRATEGIES
) -> list[Candidate]:
    """Return the candidates among these strategies, in the order in which equals are ranked.

    Rows of USP's meshes lie within a node: they divide its devices, or on one node all ranks. Those
    of "mesh" are at most about as long as its columns, since a query takes at least as many bytes
    as a key.
    """
    row = ranks if cluster.nodes == 1 else cluster.devices_per_node
    found = []
    for strategy in STRATEGIES:
        if strategy not in strategies:
            continue
        if SOFTMAX[strategy].dimensions == 1:
            found.append(Candidate(strategy))
            continue
        if strategy == "usp":
            sizes = [n for n in range(2, row + 1) if row % n == 0 and ranks % n == 0 and n < ranks]
        else:
            sizes = [n for n in range(2, ranks) if ranks % n == 0 and n * n <= 2 * ranks]
        found += [Candidate(strategy, (ranks // n, n)) for n in sizes]
    return found


def as_strategies(strategies: Sequence[str] | None) -> tuple[str, ...]:
    """Return names of strategies, by default all; raise a ValueError for others."""
    if strategies is None:
        return STRATEGIES
    given: Any = (strategies,) if isinstance(strategies, str) else strategies
    names = tuple(given) if isinstance(given, Sequence) else ()
    unknown = [x for x in names if not isinstance(x, str) or x not in STRATEGIES]
    if unknown or not names:
        expected = f"some of {sorted(STRATEGIES)}"
        raise ValueError(f"strategies must be {expected}, got {shown(strategies)}")
    return names


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text as a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(x.ljust(n) for x, n in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)

"""Fabrics: the links between nodes that messages of several nodes share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np

from seqpar.core.arguments import as_bool, as_float, as_int


@dataclass(frozen=True)
class FatTree:
    """Leaf switches, which other switches connect.

    Attributes:
        nodes_per_leaf: the number of consecutive nodes of a leaf switch.
        oversubscription: the rate of all NICs of a leaf switch over the rate of its uplinks, at
            least 1.
        rails: whether these nodes have one leaf switch for each of a node's NICs. A device sends
            through the NIC of its place in the node; between different places messages take the
            uplinks.
    """

    nodes_per_leaf: int
    oversubscription: float = 1.0
    rails: bool = False

    def __post_init__(self) -> None:
        as_int("fabric.nodes_per_leaf", self.nodes_per_leaf, 1)
        as_bool("fabric.rails", self.rails)
        if as_float("fabric.oversubscription", self.oversubscription) < 1:
            got = self.oversubscription
            raise ValueError(f"fabric.oversubscription must be at least 1, got {got}")


@dataclass(frozen=True)
class Torus:
    """Nodes in a grid whose rows, columns, … are rings of links, as TPUs have.

    Each link carries one message at full rate in each direction. A message takes the shortest way,
    one dimension after another, and a link's latency on each link.

    Attributes:
        shape: the number of nodes in each dimension. Node 1 follows node 0 in the last one.
    """

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        shape = tuple(as_int("fabric.shape", x, 1) for x in self.shape)
        object.__setattr__(self, "shape", shape)

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return prod(self.shape)

    def links(self, source: int, target: int) -> Iterator[tuple[int, int, int]]:
        """Yield the links from node to node as (node, dimension, direction)."""
        place, end = (np.unravel_index(node, self.shape) for node in (source, target))
        here = [int(x) for x in place]
        for dimension, size in enumerate(self.shape):
            ahead = (int(end[dimension]) - here[dimension]) % size
            direction, steps = (1, ahead) if 2 * ahead <= size else (-1, size - ahead)
            for _ in range(steps):
                yield int(np.ravel_multi_index(here, self.shape)), dimension, direction
                here[dimension] = (here[dimension] + direction) % size


Fabric = FatTree | Torus
_KINDS = {"fat_tree": FatTree, "torus": Torus}


def as_dict(fabric: Fabric | None) -> dict[str, object] | None:
    if fabric is None:
        return None
    (kind,) = (name for name, x in _KINDS.items() if isinstance(fabric, x))
    return {"kind": kind} | asdict(fabric)


def from_dict(values: Any) -> Fabric | None:
    """Return the fabric that `as_dict` described; raise a ValueError that names a wrong field."""
    if values is None:
        return None
    if not isinstance(values, Mapping) or values.get("kind") not in _KINDS:
        raise ValueError(f"fabric.kind must be one of {[*_KINDS]}")
    fields = {name: x for name, x in values.items() if name != "kind"}
    try:
        made: Fabric = _KINDS[values["kind"]](**fields)
    except TypeError as error:
        raise ValueError(f"fabric: {error}") from None
    return made

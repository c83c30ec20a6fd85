"""Maps as they travel: a transition and a state of each head, one behind the other in one row.

Packed maps are (n, B, H, e), where a head's e elements are those of its transition, and then those
of its state, K·V.
"""

from __future__ import annotations

import math

from torch import Tensor

from seqpar.recurrent.kinds.kind import Kind
from seqpar.recurrent.maps import Maps


def transition_shape(kind: Kind, dim: int) -> tuple[int, ...]:
    """Return the shape of a head's transition, where keys have `dim` channels."""
    shapes = {"head": (), "key": (dim,), "matrix": (dim, dim)}
    return shapes[kind.transition]


def elements(kind: Kind, dim: int, value_dim: int) -> int:
    """Return how many elements a head's packed map has."""
    return math.prod(transition_shape(kind, dim)) + dim * value_dim


def pack(maps: Maps, packed: Tensor) -> None:
    """Write maps to `packed`, (n, B, H, e)."""
    size = packed.shape[3] - math.prod(maps.state.shape[3:])
    packed[..., :size] = maps.transition.reshape(*packed.shape[:3], size)
    packed[..., size:] = maps.state.flatten(3)


def unpack(kind: Kind, packed: Tensor, dim: int) -> Maps:
    """Return the maps that `packed` (n, B, H, e) has, as views of it."""
    shape = transition_shape(kind, dim)
    size = math.prod(shape)
    transition, state = packed.split([size, packed.shape[3] - size], 3)
    return Maps(transition.reshape(*packed.shape[:3], *shape), state.unflatten(3, (dim, -1)))

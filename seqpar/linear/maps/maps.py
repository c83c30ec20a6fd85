"""Maps of spans: how maps act on states, how they compose, and how they are packed into messages.

The state that leaves a span is T S + N, where S is the state that enters, T the transition, and N
the state of only the span's rows. A transition multiplies from the left. It is a number for each
head, (n, B, H), or a number for each key channel, (n, B, H, K), or a matrix, (n, B, H, K, K).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from seqpar.linear.kinds import Kind


class Maps(NamedTuple):
    """The maps of n spans, in fp32 (fp64 for fp64)."""

    transition: Tensor
    state: Tensor  # (n, B, H, K, V)


def apply(kind: Kind, transition: Tensor, states: Tensor) -> Tensor:
    """Return transition · states, (n, B, H, K, V), without adding the spans' states."""
    if kind.transition == "matrix":
        return transition @ states
    return states * transition[(..., *[None] * (states.dim() - transition.dim()))]


def compose(kind: Kind, later: Maps, earlier: Maps) -> Maps:
    """Return the maps of joined spans: first those of `earlier`, then those of `later`."""
    if kind.transition == "matrix":
        transition = later.transition @ earlier.transition
    else:
        transition = later.transition * earlier.transition
    return Maps(transition, apply(kind, later.transition, earlier.state) + later.state)


def transposed(kind: Kind, transition: Tensor) -> Tensor:
    """Return the transition of gradients of states, which pass through a span in reverse."""
    return transition.mT if kind.transition == "matrix" else transition


def transition_shape(kind: Kind, dim: int) -> tuple[int, ...]:
    return {"head": (), "key": (dim,), "matrix": (dim, dim)}[kind.transition]


def elements(kind: Kind, dim: int, value_dim: int) -> int:
    """Return the number of elements of a head's packed map."""
    return math.prod(transition_shape(kind, dim)) + dim * value_dim


def pack(maps: Maps, packed: Tensor) -> None:
    """Write maps to `packed`, (n, B, H, e)."""
    size = packed.shape[3] - math.prod(maps.state.shape[3:])
    packed[..., :size] = maps.transition.reshape(*packed.shape[:3], size)
    packed[..., size:] = maps.state.flatten(3)


def unpack(kind: Kind, packed: Tensor, dim: int) -> Maps:
    """Return the maps in `packed` (n, B, H, e), as views of it."""
    shape = transition_shape(kind, dim)
    size = math.prod(shape)
    transition, state = packed.split([size, packed.shape[3] - size], 3)
    return Maps(transition.reshape(*packed.shape[:3], *shape), state.unflatten(3, (dim, -1)))

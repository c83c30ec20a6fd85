"""Apply the maps of spans to states, combine two maps into one map, and pack maps into messages.

A *span* is a range of consecutive tokens of a document on one rank. The *map* of a span is S → T S
+ N, where S is the state before the span. T is the transition of the span, and N is the state of
the span's own rows. A transition is one number for each head (n, B, H), one number for each key
channel (n, B, H, K), or a matrix (n, B, H, K, K).
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
    """Return transition · states, (n, B, H, K, V), without the states N of the spans' own rows."""
    if kind.transition == "matrix":
        return transition @ states
    return states * transition[(..., *[None] * (states.dim() - transition.dim()))]


def compose(kind: Kind, later: Maps, earlier: Maps) -> Maps:
    """Return the map of each pair of consecutive spans, given the maps of the earlier and the later
    spans.
    """
    if kind.transition == "matrix":
        transition = later.transition @ earlier.transition
    else:
        transition = later.transition * earlier.transition
    return Maps(transition, apply(kind, later.transition, earlier.state) + later.state)


def transposed(kind: Kind, transition: Tensor) -> Tensor:
    """Return the transition with which backward multiplies gradients of states."""
    return transition.mT if kind.transition == "matrix" else transition


def transition_shape(kind: Kind, dim: int) -> tuple[int, ...]:
    return {"head": (), "key": (dim,), "matrix": (dim, dim)}[kind.transition]


def elements(kind: Kind, dim: int, value_dim: int) -> int:
    """Return the number of elements of one head's map in a message."""
    return math.prod(transition_shape(kind, dim)) + dim * value_dim


def pack(maps: Maps, packed: Tensor) -> None:
    size = packed.shape[3] - math.prod(maps.state.shape[3:])
    packed[..., :size] = maps.transition.reshape(*packed.shape[:3], size)
    packed[..., size:] = maps.state.flatten(3)


def unpack(kind: Kind, packed: Tensor, dim: int) -> Maps:
    shape = transition_shape(kind, dim)
    size = math.prod(shape)
    transition, state = packed.split([size, packed.shape[3] - size], 3)
    return Maps(transition.reshape(*packed.shape[:3], *shape), state.unflatten(3, (dim, -1)))

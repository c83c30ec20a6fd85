"""Samples and profiles: the records of a measured machine, which costs are fitted to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypedDict

Pass = Literal["forward", "backward"]
PASSES: tuple[Pass, ...] = ("forward", "backward")


class Sample(TypedDict, total=False):
    """A timed call: its kind and shape, and raw seconds; other fields depend on the kind."""

    kind: str  # "full", "causal" and "window" (softmax attention), "linear" or "modules"
    rows: int
    keys: int
    documents: int
    window: int | None
    heads: int
    flops: float  # of a forward
    forward: list[float]
    backward: list[float]


class Profile(TypedDict):
    """A measured machine: its hardware and raw samples of one rank's work."""

    environment: Mapping[str, object]
    device: str
    devices: int
    memory: int
    dtype: str
    heads: int
    head_dim: int
    backend: str
    fused: bool
    rates: dict[str, list[float]]
    samples: list[Sample]
    held_out: list[Sample]

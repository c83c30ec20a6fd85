"""Layer and Recurrence: what one layer of a model is."""

from __future__ import annotations

from dataclasses import dataclass

from seqpar.core.arguments import as_int
from seqpar.recurrent.kinds import kind as kind_of

KINDS = ("softmax", "window", "linear")


@dataclass(frozen=True)
class Layer:
    """A layer: its attention, and its feed-forward part.

    Attributes:
        kind: "softmax", "window" (softmax attention with a window) or "linear" (a recurrence).
        window: keys that a query sees, itself included; None but for "window".
        ffn: the width of the feed-forward part that a token goes through, of all its experts.
        stored_ffn: the width of what is stored, of all experts; `ffn` where there are none.
        experts: how many experts a router chooses from; 0 where there are none.
    """

    kind: str
    window: int | None
    ffn: int
    stored_ffn: int
    experts: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"layer.kind must be one of {KINDS}, got {self.kind!r}")
        if (self.window is not None) != (self.kind == "window"):
            raise ValueError(f"layer.window: a {self.kind} layer has window {self.window!r}")
        if self.window is not None:
            as_int("layer.window", self.window, 1)
        as_int("layer.ffn", self.ffn, 0)
        as_int("layer.experts", self.experts, 0)
        as_int("layer.stored_ffn (at least ffn)", self.stored_ffn, self.ffn)


@dataclass(frozen=True)
class Recurrence:
    """What the model's linear layers have: heads of a state of key_dim × value_dim.

    `kind` is how the state decays or forgets, as `RecurrentAttention` takes it; "linear": not.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kind: str = "linear"

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
            as_int(f"recurrence.{name}", getattr(self, name), 1)
        kind_of(self.kind)  # which refuses what it does not know

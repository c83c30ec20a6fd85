"""Layer and Recurrence: the shapes of one layer of a model."""

from __future__ import annotations

from dataclasses import dataclass

from seqpar.core.arguments import as_int
from seqpar.linear.kinds import kind as kind_of

KINDS = ("softmax", "window", "linear")


@dataclass(frozen=True)
class Layer:
    """A layer: its attention and its feed-forward part.

    Attributes:
        kind: "softmax", "window" (softmax attention with a window) or "linear" (a recurrence).
        window: the number of keys that a query attends to, itself included; None except for
            "window".
        ffn: the feed-forward width that each token uses, over all its experts.
        stored_ffn: the feed-forward width that is stored, over all experts; `ffn` without experts.
        experts: the number of experts of the router; 0 without experts.
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
    """The linear layers of a model: heads with a state of key_dim × value_dim each.

    `kind` is one of `RecurrentAttention`'s kinds of decay; "linear" has no decay.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kind: str = "linear"

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
            as_int(f"recurrence.{name}", getattr(self, name), 1)
        kind_of(self.kind)  # refuses unknown kinds

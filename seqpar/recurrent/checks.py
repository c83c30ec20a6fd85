"""Check that the inputs of a recurrent call fit each other and their kind."""

from __future__ import annotations

from seqpar.core.dtypes import DTYPES
from seqpar.recurrent.inputs import Inputs
from seqpar.recurrent.kinds.kind import Kind


def check_heads(inputs: Inputs) -> None:
    """Raise unless each head of fewer serves as many of those that are more."""
    states = inputs.heads
    for name, x in (("k", inputs.k), ("v", inputs.v)):
        if states % x.shape[2]:
            expected = f"a number of heads that divides {states}, that of states"
            raise ValueError(f"{name} must have {expected}, got {x.shape[2]}")
    heads = inputs.q.shape[2]
    if states % heads and heads % states:
        expected = f"a multiple or a divisor of {states} heads, those of states"
        raise ValueError(f"q must have {expected}, got {heads}")


def check_gates(kind: Kind, inputs: Inputs, rows: str) -> None:
    """Raise unless there are the decays and β that the kind has, of the right shape and dtype.

    `rows` are the dimensions of rows by the names that the user knows, as in "B, T_local".
    """
    sizes, heads, dim = tuple(inputs.q.shape[:2]), inputs.heads, inputs.q.shape[3]
    shapes: dict[str | None, tuple[str, tuple[int, ...]]] = {
        "constant": ("(H,)", (heads,)),
        "head": (f"({rows}, H)", (*sizes, heads)),
        "key": (f"({rows}, H, K)", (*sizes, heads, dim)),
    }
    wanted = shapes.get(kind.decay), shapes["head"] if kind.uses_beta else None
    gates = ("log_decay", inputs.log_decay), ("beta", inputs.beta)
    for (name, x), expected in zip(gates, wanted, strict=True):
        if expected is None or x is None:
            if (expected is None) != (x is None):
                needed = "None" if expected is None else f"a tensor {expected[0]}"
                found = "None" if x is None else f"one of shape {tuple(x.shape)}"
                raise ValueError(f"{name} must be {needed} for the kind {kind.name!r}, got {found}")
        elif tuple(x.shape) != expected[1] or x.dtype not in DTYPES:
            found = f"{tuple(x.shape)} of {x.dtype}"
            raise ValueError(f"{name} must be {expected[0]}, {expected[1]}, of floats, got {found}")

"""The recurrence itself: what one token does to a state."""

from __future__ import annotations

from torch import Tensor


def advance(state: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None) -> Tensor:
    """Return the states (…, K, V) after one token; see `kinds.kind` for the formula.

    k is (…, K), v (…, V), decay, not its logarithm, (…, K or 1), beta (…, 1) or None.
    """
    state = decay[..., None] * state
    if beta is not None:
        v = beta * (v - read(state, k))
    return state + k[..., :, None] * v[..., None, :]


def read(state: Tensor, k: Tensor) -> Tensor:
    """Return what states say of a key, Sᵀ k (…, V)."""
    return (state * k[..., :, None]).sum(-2)

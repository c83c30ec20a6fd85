"""What tells one kind of recurrence from another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Kind:
    """A recurrence of the state S (K, V) of a head, token by token.

        S̄ₜ = diag(exp gₜ) Sₜ₋₁
        Sₜ = S̄ₜ + kₜ vₜᵀ, or by the delta rule S̄ₜ + βₜ kₜ (vₜ − S̄ₜᵀ kₜ)ᵀ
        oₜ = scale · Sₜᵀ qₜ

    Attributes:
        name: what users call it.
        decay: of what g has its own value. None: g = 0. "constant": of each head, (H,). "head": of
            each token and head, (B, T, H). "key": of each token, head and key channel (B, T, H, K).
        uses_beta: whether it follows the delta rule, with β (B, T, H).
    """

    name: str
    decay: Literal["constant", "head", "key"] | None
    uses_beta: bool

    @property
    def transition(self) -> Literal["head", "key", "matrix"]:
        """What a span multiplies a state by: a number a head, one a key channel, or a matrix."""
        if self.uses_beta:
            return "matrix"
        return "key" if self.decay == "key" else "head"

"""The kinds of linear attention, and the recurrence of each kind.

Each head has a state S (K, V), which token t updates:

    S̄ₜ = diag(exp gₜ) Sₜ₋₁
    Sₜ = S̄ₜ + kₜ vₜᵀ, or by the delta rule S̄ₜ + βₜ kₜ (vₜ − S̄ₜᵀ kₜ)ᵀ
    oₜ = scale · Sₜᵀ qₜ

The recurrence does not normalise keys. If a model needs keys of length 1, the model must normalise
its keys before the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from seqpar.core.arguments import shown


@dataclass(frozen=True)
class Kind:
    name: str  # the name that users pass
    # the shape of g. None: g is 0. "constant": (H,). "head": (B, T, H). "key": (B, T, H, K).
    decay: Literal["constant", "head", "key"] | None
    uses_beta: bool  # whether the kind follows the delta rule, with β (B, T, H)

    @property
    def transition(self) -> Literal["head", "key", "matrix"]:
        """What a transition consists of: one number per head, one number per key channel, or a
        matrix.
        """
        if self.uses_beta:
            return "matrix"
        return "key" if self.decay == "key" else "head"

    @property
    def constant_transition(self) -> bool:
        """Whether the layout determines the transition of every span, so that every rank can
        compute it.
        """
        return not self.uses_beta and self.decay in (None, "constant")


_TABLE = (
    # Katharopoulos et al., "Transformers are RNNs" (2020), section 3.3, equation 18, without the
    # normaliser: a column of ones in v computes it.
    Kind("linear", decay=None, uses_beta=False),
    # Sun et al., "Retentive Network" (2023), section 2.1, equation 6; also Lightning Attention and
    # MiniMax-01.
    Kind("constant_decay", decay="constant", uses_beta=False),
    # Dao and Gu, "Transformers are SSMs" (2024), section 5: Mamba-2, where k is B, q is C, v is Δ x
    # and g is Δ A. Also the simple GLA of Yang et al.
    Kind("scalar_decay", decay="head", uses_beta=False),
    # Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (2024),
    # section 4.1, equation 3.
    Kind("vector_decay", decay="key", uses_beta=False),
    # Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"
    # (2024), section 2.2, equation 2: DeltaNet. The paper's keys have length 1.
    Kind("delta", decay=None, uses_beta=True),
    # Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2025), section 3.1, equation 10: the
    # recurrent layers of Qwen3-Next and Qwen3.5.
    Kind("gated_delta", decay="head", uses_beta=True),
    # Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture" (2025), section 3,
    # equation 1.
    Kind("kda", decay="key", uses_beta=True),
)
KINDS = {kind.name: kind for kind in _TABLE}


def kind(name: str) -> Kind:
    if not isinstance(name, str) or name not in KINDS:
        raise ValueError(f"kind must be one of {list(KINDS)}, got {shown(name)}")
    return KINDS[name]


def advance(state: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None) -> Tensor:
    """Return the states (…, K, V) after one token, given the states before the token.

    The key `k` is (…, K), and the value `v` is (…, V). `decay` is exp g, (…, K or 1). `beta` is
    (…, 1), or None without the delta rule.
    """
    state = decay[..., None] * state
    if beta is not None:
        v = beta * (v - read(state, k))
    return state + k[..., :, None] * v[..., None, :]


def read(state: Tensor, k: Tensor) -> Tensor:
    """Return Sᵀ k (…, V), the value that the state S stores for the key k."""
    return (state * k[..., :, None]).sum(-2)

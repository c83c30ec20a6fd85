"""Kimi Delta Attention: the delta rule, on a state of which each key channel first decays.

    S̄ₜ = diag(aₜ) Sₜ₋₁, where aₜ = exp gₜ is a vector
    Sₜ = S̄ₜ + βₜ kₜ (vₜ − S̄ₜᵀ kₜ)ᵀ = (I − βₜ kₜ kₜᵀ) diag(aₜ) Sₜ₋₁ + βₜ kₜ vₜᵀ

Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture" (2025), section 3,
equation 1.
"""

from seqpar.recurrent.kinds.kind import Kind

KIND = Kind("kda", decay="key", uses_beta=True)

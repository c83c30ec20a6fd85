"""Gated DeltaNet: the delta rule, on a state that first decays by a number of the token and head.

    S̄ₜ = aₜ Sₜ₋₁, where aₜ = exp gₜ is a number
    Sₜ = S̄ₜ + βₜ kₜ (vₜ − S̄ₜᵀ kₜ)ᵀ = aₜ (I − βₜ kₜ kₜᵀ) Sₜ₋₁ + βₜ kₜ vₜᵀ

Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2025), section 3.1, equation 10; the recurrent
layers of Qwen3-Next and Qwen3.5.
"""

from seqpar.recurrent.kinds.kind import Kind

KIND = Kind("gated_delta", decay="head", uses_beta=True)

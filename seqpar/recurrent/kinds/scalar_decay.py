"""Linear attention with a decay of each token and head.

    Sₜ = aₜ Sₜ₋₁ + kₜ vₜᵀ, where aₜ = exp gₜ is a number

Dao and Gu, "Transformers are SSMs" (2024), section 5: Mamba-2's structured state space duality,
where k is B, q is C, v is Δ x and g is Δ A. It is also Yang et al.'s simple GLA.
"""

from seqpar.recurrent.kinds.kind import Kind

KIND = Kind("scalar_decay", decay="head", uses_beta=False)

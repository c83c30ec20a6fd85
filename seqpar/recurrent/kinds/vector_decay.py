"""Gated linear attention: a decay of each token, head and key channel.

    Sₜ = diag(aₜ) Sₜ₋₁ + kₜ vₜᵀ, where aₜ = exp gₜ is a vector

Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (2024), section
4.1, equation 3.
"""

from seqpar.recurrent.kinds.kind import Kind

KIND = Kind("vector_decay", decay="key", uses_beta=False)

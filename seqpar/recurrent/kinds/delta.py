"""DeltaNet: what the state says of a key is moved towards the key's value.

    Sₜ = Sₜ₋₁ + βₜ kₜ (vₜ − Sₜ₋₁ᵀ kₜ)ᵀ = (I − βₜ kₜ kₜᵀ) Sₜ₋₁ + βₜ kₜ vₜᵀ

Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (2024),
section 2.2, equation 2. Keys are taken as they are: the paper's have length 1.
"""

from seqpar.recurrent.kinds.kind import Kind

KIND = Kind("delta", decay=None, uses_beta=True)

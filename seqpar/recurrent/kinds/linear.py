"""Linear attention without decay.

    Sₜ = Sₜ₋₁ + kₜ vₜᵀ

Katharopoulos et al., "Transformers are RNNs" (2020), section 3.3, equation 18, without the
normaliser: whoever wants one gives v a column of ones.
"""

from seqpar.recurrent.kinds.kind import Kind

KIND = Kind("linear", decay=None, uses_beta=False)

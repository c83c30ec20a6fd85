"""Linear attention whose heads each forget at a rate of their own, the same at each token.

    Sₜ = λ Sₜ₋₁ + kₜ vₜᵀ

Sun et al., "Retentive Network" (2023), section 2.1, equation 6; also Lightning Attention and
MiniMax-01. `seqpar.LASP2Attention` computes this kind.
"""

from seqpar.recurrent.kinds.kind import Kind

KIND = Kind("constant_decay", decay="constant", uses_beta=False)

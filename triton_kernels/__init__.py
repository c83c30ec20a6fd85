"""The shared Triton kernels, imported as `seqpar.kernels`. They import nothing of seqpar."""

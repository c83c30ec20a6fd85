"""The shared Triton kernels, imported as `seqpar.kernels`. They import nothing of seqpar.

Start with the `reference.py` of a folder, which its kernels are tested against.
"""

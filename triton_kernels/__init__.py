"""The shared Triton kernels, imported as `seqpar.kernels`. The kernels import nothing from seqpar.

In each folder, start with `reference.py`, the plain PyTorch code with which tests compare the
kernels.
"""

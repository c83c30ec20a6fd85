"""Code that softmax attention and linear attention share: the module, the tensors of a call, the
choice of a backend, and the registration of operators with torch.

Start with `module.py`, the base class of every module that a user creates.
"""

"""Code that softmax and linear attention share: modules, operands, backends and operators.

Start with `module.py`, the base class of every module that a user creates.
"""

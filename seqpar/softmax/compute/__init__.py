"""Arithmetic on one rank that all strategies share: partial results (out, lse) and their merging,
ALiBi slopes, max logits, and computing on one thread each.

Start with `partial.py`.
"""

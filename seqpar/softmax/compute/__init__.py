"""Arithmetic on one rank that no strategy changes: partial results (out, lse), how they are merged,
ALiBi slopes, max logits, and elementwise functions whose bits do not depend on a tensor's shape.

Start with `partial.py`.
"""

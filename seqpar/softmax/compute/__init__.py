"""Arithmetic on one rank that all strategies share: partial results (out, lse) and their merging,
options of scores, and max logits.

Start with `partial.py`.
"""

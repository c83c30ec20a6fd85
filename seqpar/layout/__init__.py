"""Layouts and masks: which rank holds which tokens, and which query attends to which key.

Start with `layout.py`, what users make, and `geometry.py`, what everything else reads.
"""

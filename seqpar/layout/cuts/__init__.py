"""Cuts of documents into the spans that each rank holds: contiguous, zigzag, striped and others.

Start with `cut.py`, which defines the protocol `Cut`.
"""

"""Cuts of documents into the spans that each rank holds: contiguous, striped, zigzag and others.

Start with `cuts.py`.
"""

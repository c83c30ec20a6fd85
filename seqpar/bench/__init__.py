"""Measure strategies and their alternatives over lengths, heads, masks and ranks: what `python -m
seqpar bench` runs.

Start with `sweep.py`.
"""

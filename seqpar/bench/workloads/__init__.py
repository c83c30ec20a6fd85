"""The points of a sweep: workloads (lengths, heads, masks) and contenders (strategies, libraries).

Start with `workloads.py`.
"""

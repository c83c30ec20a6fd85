"""The processes of a sweep's ranks, and their measurements.

Start with `rank.py`. The processes are started by `ranks.py`.
"""

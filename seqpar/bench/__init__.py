"""Benchmark strategies and other libraries over lengths, heads, masks and ranks.

`python -m seqpar bench` runs a sweep. `workloads/` lists its points, `workers/` measures them in
processes, and `results/` keeps and reports the figures. Start with `sweep.py`.
"""

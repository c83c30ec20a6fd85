"""Benchmark strategies and other libraries over lengths, heads, masks and ranks.

Start with `sweep.py`. `workloads/` lists points, `workers/` measures them, `results/` reports.
"""

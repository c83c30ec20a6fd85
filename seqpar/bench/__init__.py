"""Benchmark strategies and other libraries over lengths, heads, masks and ranks.

A *sweep* measures *points*: a *workload* (a batch with its heads, mask and number of ranks) with a
*contender* (a strategy, another library, or one device). Start with `sweep.py`. `workloads/` lists
points, `workers/` measures them, and `results/` reports them.
"""

"""Benchmark strategies and other libraries over lengths, heads, masks and ranks.

A *sweep* measures *points*. A point is a *workload* with a *contender*. A workload is a batch with
its heads, its mask and a number of ranks. A contender is a strategy, another library, or one
device.

Start with `sweep.py`. `workloads/` lists the points, `workers/` measures points, and `results/`
reports the measurements.
"""

"""Benchmark strategies and other libraries over lengths, heads, masks and ranks.

A *sweep* measures *points*. A point is a *workload* that a *contender* computes. A workload is a
batch, with heads, a mask and a number of ranks. A contender is a strategy, another library, or our
kernel on one device.

Start with `sweep.py`. `workloads/` lists the points, `workers/` measures points, and `results/`
reports the measurements.
"""

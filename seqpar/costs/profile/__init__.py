"""Measure this machine. `seqpar.costs.fit` computes costs from the measurements.

`machine.py` measures. `calls.py` has the calls that are timed. `harness.py` has the parts that
benchmarks use too.
"""

"""Measure this machine. `seqpar.costs.fit` computes costs from the measurements.

`machine.py` measures, `calls.py` defines the calls that are timed, and `harness.py` contains what
benchmarks use too.
"""

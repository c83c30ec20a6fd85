"""Measure this machine; `seqpar.costs.fit` turns the measurements into costs.

`machine.py` measures, `calls.py` has the calls that are timed, and `harness.py` is shared with
benchmarks.
"""

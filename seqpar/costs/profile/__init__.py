"""Measure this machine; costs are fitted to the result.

`machine.py` measures, `calls.py` has the calls that are timed, and `harness.py` is shared with
benchmarks.
"""

"""Measurements of this machine, from which costs are fitted: `machine.py` measures, and
`harness.py` times fairly."""

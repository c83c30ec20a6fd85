"""Linear attention whose decays or updates depend on the data: spans exchange maps.

A map is a transition and a state (`maps.py`). Start with `map_strategy.py`, then read one of the
three exchanges: `gather.py`, `scan.py` or `tree.py`.
"""

"""Linear attention for which ranks exchange maps, because decays or updates depend on the data.

The map of a span turns the state that enters the span into the state that leaves it. It consists of
a transition and a state (`maps.py`). Start with `map_strategy.py`, then read one of the three
exchanges: `gather.py`, `scan.py` or `tree.py`.
"""

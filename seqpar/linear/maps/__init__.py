"""Linear attention whose decays or updates depend on the data, so that ranks exchange maps.

The *map* of a span is the function from the state that enters the span to the state that leaves the
span. A map consists of a transition and a state (`maps.py`). Start with `map_strategy.py`, then
read one of the three exchanges: `gather.py`, `scan.py` or `tree.py`.
"""

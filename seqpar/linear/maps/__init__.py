"""Linear attention whose decays or updates depend on the data, so that ranks exchange maps.

A *span* is a range of consecutive tokens of a document on one rank. The *map* of a span is the
function from the state S that enters the span to the state T S + N that leaves the span
(`maps.py`). T is called the transition of the span. Start with `map_strategy.py`, and continue with
one of the three exchanges: `gather.py`, `scan.py` or `tree.py`.
"""

"""Keys and values move and queries stay: the common code of Ring and AllGather.

Start with `strategy.py`, then read `plan.py` (which rows travel in which step) and `exchange.py`
(the messages). The files `rank_invariant_*.py` compute the same bits on any number of ranks, for
`deterministic="ranks"`.
"""

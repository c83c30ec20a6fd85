"""Keys and values move and queries stay: the common code of Ring and AllGather.

Start with `key_strategy.py`, then read `key_plan.py` (which rows travel in which step) and
`key_exchange.py` (the messages). The files `rank_invariant_*.py` compute the same bits on any
number of ranks, for `deterministic="ranks"`.
"""

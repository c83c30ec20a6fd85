"""Ring and AllGather: keys and values are sent between ranks, and queries stay.

Start with `key_strategy.py`. Then read `key_plan.py`, which decides which rows are sent in which
step, and `key_exchange.py`, which sends them. The files `rank_invariant_*.py` implement
`deterministic="ranks"`: results with the same bits on any number of ranks.
"""

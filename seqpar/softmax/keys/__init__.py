"""Ring and AllGather, the strategies that send keys and values. Queries stay on their ranks.

Start with `key_strategy.py`. Then read `key_plan.py`, which decides which rows are sent in which
step, and `key_exchange.py`, which sends them. The files `rank_invariant_*.py` implement
`deterministic="ranks"`, with which results have the same bits on any number of ranks.
"""

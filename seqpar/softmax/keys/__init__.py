"""Ring and AllGather, the strategies that send keys and values. Queries stay on their ranks.

Start with `key_strategy.py`. The files `rank_invariant_*.py` implement `deterministic="ranks"`,
with which results have the same bits on any number of ranks.
"""

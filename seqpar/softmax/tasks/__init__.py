"""Attention as tasks on any rank: the common code of disaggregated attention, and calls that begin
and finish separately.

Start with `planner.py`, which decides who computes what, then `exchange.py` and
`task_attention.py`. The files `split_*.py` are calls in two parts, between which a model can do
other work.
"""

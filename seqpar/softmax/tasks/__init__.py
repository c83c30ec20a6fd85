"""Attention as tasks that any rank may compute, and calls in two parts.

Start with `planner.py`, which decides who computes each task, then read `plan.py` and
`task_attention.py`. `split.py` is for calls that begin and finish separately, so that a model can
do other work in between.
"""

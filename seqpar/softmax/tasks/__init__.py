"""Attention as tasks that any rank may compute, and calls in two parts.

Start with `task_plan.py`, which plans a rank's messages and work for given tasks, then read
`task_attention.py`. `split.py` is for calls that begin and finish separately, so that a model can
do other work in between.
"""

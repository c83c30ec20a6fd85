"""Attention as tasks that any rank may compute, and calls in two parts.

A task is some queries and some keys of one document. Start with `task_plan.py`, which plans the
messages and the work of one rank for given tasks. `task_attention.py` carries out this plan.
`split.py` is for calls that begin and finish separately, so that a model can do other work in
between.
"""

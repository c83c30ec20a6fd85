"""Attention as tasks that any rank may compute, and calls that are made in two parts.

A *task* is attention of some queries over some keys of one document. Start with `task_plan.py`,
which plans the messages and the work of one rank for given tasks. `task_attention.py` sends these
messages and computes this work. `split.py` divides a call into two parts, so that a model can do
other work between the parts.
"""

"""Attention that is cut into tasks, which any rank may compute, and calls in two parts.

A *task* is attention of some queries over some keys of one document. Start with `task_plan.py`,
which plans the messages and the work of one rank for given tasks. `split.py` divides a call into
two parts, so that a model can do other work between the parts.
"""

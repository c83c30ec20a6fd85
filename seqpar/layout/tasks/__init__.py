"""Attention as a list of tasks, which any rank or attention server can compute.

Start with `tasks.py`. `task_rows.py` finds the rows that each task reads.
"""

"""Divide attention into tasks, each of which any rank or attention server can compute.

Start with `tasks.py`. `task_rows.py` finds the rows that each task reads.
"""

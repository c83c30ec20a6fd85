"""Attention as a list of tasks that any rank or attention server can compute.

Start with `tasks.py`. The other files check tasks, cut them into parts, and find the rows that each
task reads.
"""

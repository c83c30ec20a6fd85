"""How long a batch will take and how much memory it needs under a given assignment.

Start with `prediction.py`.
"""

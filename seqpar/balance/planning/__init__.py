"""From the lengths of documents to a plan: which documents are in which micro-batch, and on which
ranks.

Start with `planner.py`, then `plans.py`, the result that users receive.
"""

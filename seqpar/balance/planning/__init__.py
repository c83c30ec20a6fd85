"""Plan from the lengths of documents: which documents share a micro-batch, and on which ranks.

Start with `planner.py`, then `plans.py`, the result that users receive.
"""

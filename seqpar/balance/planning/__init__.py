"""Plan which documents form a micro-batch, and which ranks hold their tokens.

Start with `planner.py`, then `plans.py`, the result that users receive.
"""

"""A trainer's side of its attention servers: which server computes which task, and what happens
when one fails.

Start with `pool.py`, then `dispatcher.py`, which sends tasks and collects results.
"""

"""Loss and gradients over ranks: each value is the one that a single process would compute.

Start with `losses.py`, then `gradients.py`, which finds out what averages gradients.
"""

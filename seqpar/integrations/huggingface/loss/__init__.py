"""Loss and gradients over ranks, equal to those that a single process would compute.

Start with `losses.py`, then `gradients.py`, which finds out what averages gradients.
"""

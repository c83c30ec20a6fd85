"""Loss and gradients over ranks: each value is what one process would compute.

Start with `losses.py`, then `gradients.py`, which finds out who averages.
"""

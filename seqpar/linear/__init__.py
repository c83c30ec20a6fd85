"""Linear attention, from plain linear attention to Kimi Delta Attention.

`kinds.py` has the table of kinds; start there. This folder has what all kinds share: which states
enter which spans, and how states pass from span to span. The *transition* of a span is the factor
by which it multiplies a state that enters it. `states/` holds the kinds and calls in which every
rank knows all transitions from the layout, and `maps/` holds all others.

A *pass* is the forward or the backward of a call.
"""

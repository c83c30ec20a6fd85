"""Linear attention, from plain linear attention to Kimi Delta Attention.

`kinds.py` has the table of kinds; start there. This folder has what all kinds share: which states
enter which spans, and how states pass from span to span. `states/` holds the kinds and calls whose
transitions every rank knows from the layout, and `maps/` all others.
"""

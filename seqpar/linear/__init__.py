"""Linear attention, from plain linear attention to Kimi Delta Attention.

Start with `kinds.py`, which has the table of kinds. A head has a *state*, a matrix that summarises
all earlier tokens of a document. A *span* is consecutive tokens of a document on one rank. Its
*transition* is the factor by which it multiplies the state that enters it.

This folder has what all kinds share: which states enter which spans, and how states pass from span
to span. `states/` is for kinds and calls whose transitions follow from the layout, so that all
ranks know them. `maps/` is for all others. A *pass* is the forward or the backward of a call.
"""

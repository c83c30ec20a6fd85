"""Linear attention for which ranks exchange states: LASP-2, ZeCO, and calls without causality.

A *state* is a matrix for each head, which summarises tokens of a document. In this folder, the
decay is constant, so every rank knows by which factor the tokens of any rank decay a state. Start
with `state_strategy.py`, the base class of the strategies, and continue with `state_options.py`.
"""

"""Linear attention for which ranks exchange states: LASP-2, ZeCO, and calls without causality.

In this folder, the decay is constant, so every rank knows by which factor a span decays a state.
Start with `state_strategy.py`, the base of the strategies, then read `state_options.py`.
"""

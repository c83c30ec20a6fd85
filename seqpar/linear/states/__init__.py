"""Linear attention for which ranks exchange states: LASP-2, ZeCO, and calls without causality.

The decay is constant here, so that every rank knows by how much each span decays a state. Start
with `state_strategy.py`, which both exchanges share, then read `state_options.py`.
"""

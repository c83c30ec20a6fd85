"""Linear attention whose spans exchange states: LASP-2, ZeCO, and calls without causality.

Here every rank knows each span's transition from the layout and a constant decay, so only states
are sent. Start with `state_strategy.py`, which both exchanges share, then read `state_options.py`.
"""

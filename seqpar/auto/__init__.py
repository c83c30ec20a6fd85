"""The strategy "auto": simulate the candidates, measure those that are close, call the fastest.

A *candidate* is a strategy with the shape of its mesh. Start with `choosing.py`, then `module.py`,
which users call.
"""

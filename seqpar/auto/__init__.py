"""The strategy "auto": simulate all candidates, measure the best few, and call the fastest.

A *candidate* is a strategy with the shape of its mesh. Start with `choosing.py`, and continue with
`module.py`, which users call.
"""

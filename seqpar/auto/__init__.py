"""The strategy "auto": it simulates the candidates, measures those whose predictions are close, and
calls the fastest.

Start with `choosing.py`, then `module.py`, which users call.
"""

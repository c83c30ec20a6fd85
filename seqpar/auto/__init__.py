"""The strategy "auto": simulate the candidates, measure the close ones, and call the fastest.

Start with `choosing.py`, then `module.py`, which users call.
"""

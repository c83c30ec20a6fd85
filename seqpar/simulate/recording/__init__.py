"""A strategy's own code on tensors without data, recorded as a program of operators and messages.

Start with `recording.py`, then `program.py`, its result.
"""

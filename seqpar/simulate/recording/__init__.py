"""Record a strategy's own code, run on tensors without data, as a program.

A program is one rank's list of operators, messages and waits. Start with `recording.py`, then read
`program.py`, its result.
"""

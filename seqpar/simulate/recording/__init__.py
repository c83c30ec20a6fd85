"""Record programs from a strategy's code, which runs on tensors without data.

A program is one rank's list of operators, messages and waits. Start with `recording.py`, then read
`program.py`, its result.
"""

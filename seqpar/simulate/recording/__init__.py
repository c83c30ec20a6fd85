"""Record programs from a strategy's code, which runs on tensors without data.

A program is the list of one rank's computations, messages and waits. Start with `recording.py`,
then read `program.py`, which defines programs.
"""

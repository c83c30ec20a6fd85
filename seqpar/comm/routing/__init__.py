"""Divide messages between nodes among network cards (NICs).

Start with `routing.py`, which decides which ranks relay messages of other ranks, and lists what
each rank posts. `relays.py` posts the messages.
"""

"""Distribute messages between nodes over all network cards (NICs) of the nodes.

Start with `routing.py`, which decides which ranks relay messages of other ranks. `relays.py` posts
the messages.
"""

"""Divide messages between nodes among network cards (NICs).

Start with `routing.py`, which decides which ranks relay for which. `hops.py` lists what each rank
posts, and `relays.py` posts it.
"""

"""Divide messages between nodes among network cards (NICs).

Start with `routing.py`, which decides which ranks relay for which and lists what each rank posts.
`relays.py` posts it.
"""

"""A trainer's side of its attention servers: it chooses a server for each task and replaces servers
that fail.

Start with `pool.py`, the public class. A request goes from there to `dispatcher.py`, which owns the
thread; `known_servers.py` chooses a server; `connection.py` talks to it.
"""

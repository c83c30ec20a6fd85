"""A trainer's side of its attention servers: it chooses a server for each task and replaces servers
that fail.

Start with `pool.py`, the public class. A request goes from there to `dispatcher.py`, which runs
in the event loop of `transport/event_loop.py`; `known_servers.py` chooses a server; `connection.py`
talks to it.
"""

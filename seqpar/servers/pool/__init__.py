"""The trainer's side of attention servers: it chooses a server for each task, and repeats a task
that a server has failed to compute.

Start with `pool.py`, the public class. `dispatcher.py` gets the requests and runs in the event loop
of `transport/event_loop.py`. `known_servers.py` chooses a server, and `connection.py` sends the
request to the server.
"""

"""The client of attention servers, which runs in the trainer. The client chooses a server for each
task, and sends the task to another server if the first server fails.

Start with `pool.py`, the public class. `dispatcher.py` receives the requests from the trainer's
threads, and runs in the event loop of `transport/event_loop.py`. `known_servers.py` chooses a
server. `connection.py` sends a request to the chosen server.
"""

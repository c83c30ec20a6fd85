"""The process that computes attention for trainers.

Start with `server.py`, whose loop answers requests. `sessions.py` and `leases.py` say which client
may use what, and `worker.py` computes.
"""

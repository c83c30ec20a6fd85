"""The process that computes attention for trainers.

Start with `server.py`, whose loop reads requests, has them computed and sends results. `clients.py`
has one object per client, `worker.py` the threads that compute, and `compute.py` the attention
itself. `counters.py` lists the numbers that a server reports.
"""

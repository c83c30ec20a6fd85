"""The process that computes attention for trainers.

Start with `server.py`, which listens at an address, and `service.py`, which answers the calls.
`sessions.py` keeps the sessions of clients, and `account.py` divides the memory among clients.
`worker.py` runs the computing threads, which call `compute.py`. `counters.py` lists the numbers
that a server reports.
"""

"""The process that computes attention for trainers.

Start with `server.py`, which listens at an address, and `service.py`, which answers the calls.
`sessions.py` has an object for each session, and `account.py` divides the memory among clients.
`worker.py` has the threads that compute, and `compute.py` computes attention in them. `counters.py`
lists the numbers that a server reports.
"""

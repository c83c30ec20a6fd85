"""The process that computes attention for trainers.

Start with `server.py`, the address at which it serves, and `service.py`, the calls that it answers.
`sessions.py` has one object per session, `account.py` divides the memory among clients, `worker.py`
has the threads that compute, and `compute.py` the attention itself. `counters.py` lists the numbers
that a server reports.
"""

"""Play programs on a cluster in virtual time, giving an outcome.

Start with `playing.py`. `op_costs.py` gives the seconds of computation, `network.py` moves
messages, and `shares.py` divides links, NICs and cores among the jobs that use them at the same
time.
"""

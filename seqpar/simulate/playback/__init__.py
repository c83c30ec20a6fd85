"""Play programs on a cluster in virtual time.

Start with `playing.py`. `op_costs.py` computes the seconds of computations, `network.py` simulates
messages, and `shares.py` divides links, NICs and cores among the jobs that use them at the same
time.
"""

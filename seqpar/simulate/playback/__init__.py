"""Play programs on a cluster in virtual time.

A *program* is the list of one rank's computations, messages and waits. Start with `playing.py`.
`op_costs.py` computes the seconds of computations, `network.py` simulates messages, and `shares.py`
divides links, NICs and cores among the computations and messages that use them at the same time.
"""

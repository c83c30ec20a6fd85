"""A recorded program under virtual time on a described cluster.

Start with `playing.py`. `network.py` shares the links, and `op_costs.py` prices the operators.
"""

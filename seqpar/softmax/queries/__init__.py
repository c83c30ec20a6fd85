"""TokenRing and Mesh, in which ranks send queries to other ranks and receive the results.

Start with `tile_strategy.py`, which implements forward and backward. `tiles.py` decides which rows
the ranks of a mesh send to each other. `query_exchange.py` sends queries and receives their
results.
"""

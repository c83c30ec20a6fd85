"""TokenRing and Mesh: queries are sent to other ranks, and their results return.

Start with `tile_strategy.py`, which has forward and backward. `tiles.py` decides which rows are
sent between the ranks of a mesh, and `query_exchange.py` sends queries and receives their results.
"""

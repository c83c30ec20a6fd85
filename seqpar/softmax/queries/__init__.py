"""Queries move and partial results return: the common code of TokenRing and Mesh.

Start with `tile_strategy.py`. `tiles.py` decides which rows travel on the mesh of ranks, and
`query_exchange.py` sends queries and gets their results back.
"""

"""Queries move, and partial results return: the common code of TokenRing and Mesh.

Start with `strategy.py`. `exchange.py` schedules which queries a rank receives in which hop, and
`tile.py` is a rank's place on the mesh.
"""

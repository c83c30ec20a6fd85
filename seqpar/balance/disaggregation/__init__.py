"""Tasks for attention on any rank or server, so that all of them finish at about the same time.

Start with `disaggregate.py`. A batch is cut into cells (`cells.py`), and parts of cells move
between ranks (`transfers.py`).
"""

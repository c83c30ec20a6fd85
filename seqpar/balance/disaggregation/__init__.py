"""Assign attention to ranks or servers as tasks, so that all finish at about the same time.

Start with `disaggregate.py`. A batch is cut into cells (`cells.py`), and parts of cells move
between servers (`transfers.py`). A *server* computes attention: a rank, or a separate process.
"""

"""Assign attention to servers as tasks, so that all servers finish at about the same time.

Start with `disaggregate.py`. A *server* is a rank, or a separate process, that computes attention.
A *cell* is the attention of a span of consecutive query rows on one server (`cells.py`). Parts of
cells are moved from overloaded servers to other servers (`transfers.py`).
"""

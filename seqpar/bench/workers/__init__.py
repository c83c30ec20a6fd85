"""The processes of a sweep's ranks, and their measurements.

Start with `rank.py`; `ranks.py` starts the processes.
"""

"""What each rank does in a process of its own while a sweep runs.

Start with `rank.py`; `ranks.py` starts the processes.
"""

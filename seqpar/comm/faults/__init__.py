"""Find the rank at fault when a message does not arrive.

Start with `heartbeat.py`: a thread on each rank writes a beat to the group's store and reads the
beats of the others. `witness.py` judges silence, and `watcher.py` asks the operating system whether
a process is alive.
"""

"""Find the rank at fault when a message does not arrive.

Start with `heartbeat.py`, which defines `PeerError`: a thread on each rank writes a beat to the
group's store and reads the beats of other ranks. `witness.py` decides which silent rank is at
fault, and `process_states.py` asks the process-state servers of silent ranks whether those ranks
live.
"""

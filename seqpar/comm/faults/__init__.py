"""Find the rank at fault if a message does not arrive.

Start with `heartbeat.py`. On each rank, a thread writes a *beat* to the group's store, and reads
the beats of other ranks. `witness.py` decides which rank is at fault, and `process_states.py` asks
whether the processes of silent ranks are alive. After this decision, all ranks that wait for
messages raise a `PeerError`.
"""

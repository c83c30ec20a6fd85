"""Find the rank at fault if a message does not arrive.

Start with `heartbeat.py`. On each rank, a thread tells the other ranks at intervals that the rank
is alive. If a rank is at fault, all ranks that wait for messages raise a `PeerError`.
"""

"""The transports between a pool and a server: ZeroMQ over TCP or Unix sockets, and one-sided writes
with NIXL.

Start with `client_socket.py` and `server_socket.py`, the two ends of a ZeroMQ connection, and with
`zeromq.py`, the interface of payload transports. `peers.py` identifies clients, and `curve_keys.py`
reads the keys of both sides.
"""

"""How frames travel between a pool and a server: ZeroMQ over TCP or Unix sockets, or one-sided
writes with NIXL.

Start with `client_socket.py` and `server_socket.py`. `peers.py` says who a client is, and
`curve_keys.py` reads the keys of both sides.
"""

"""How clients and servers connect: addresses, certificates, gRPC's options, and NIXL.

Start with `addresses.py` and `routes.py`, which checks an address before a client connects. On one
machine, `unix_sockets.py` and `loopback.py` keep other users out. Between machines, both sides
authenticate with `certificates.py`; `authority.py` makes the certificates. `options.py` opens
gRPC's channels, and `one_sided.py` writes payloads with NIXL.
"""

"""How clients and servers reach each other: addresses, certificates, gRPC's options, and NIXL.

Start with `addresses.py` and `routes.py`, the checked way from a client to a server.
`unix_sockets.py` and `loopback.py` keep other users of the machine out, and `certificates.py`
authenticates both sides elsewhere; `authority.py` makes the certificates. `options.py` opens gRPC's
channels, and `one_sided.py` writes payloads with NIXL.
"""

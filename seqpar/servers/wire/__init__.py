"""The messages between a pool and its attention servers, independent of the transport.

Start with `protocol.py`, the list of messages. `codec.py` converts a request to a header and bytes
and back, and `limits.py` bounds what either side accepts.
"""

"""What travels between a pool and its attention servers, independent of the transport.

Start with `protocol.py`, the list of messages. `codec.py` writes a request as a header with bytes
and reads it again, and `limits.py` bounds what either side accepts.
"""

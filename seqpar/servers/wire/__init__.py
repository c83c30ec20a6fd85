"""The messages between a pool and its attention servers, independent of the transport.

Start with `messages.py`, what a pool asks of a server. `versions.py` converts it to the messages of
`attention.proto` and back, `codec.py` converts a request to a header and bytes and back, and
`limits.py` bounds what either side accepts.
"""

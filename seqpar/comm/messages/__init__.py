"""Post messages between ranks, wait for them, and check that two ranks make the same exchange.

Start with `comm.py`. A `Comm` is a group of ranks as one rank sees it, and `Comm.exchange` posts
messages. On gloo, a header is sent with each exchange (`message_header.py`). It contains the number
of the call and a digest of the call's arguments.
"""

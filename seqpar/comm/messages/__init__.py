"""Messages between ranks: posting them, waiting for them, and checking that both ranks mean the
same.

Start with `comm.py`. A `Comm` is a group as one rank sees it, and `Comm.exchange` posts messages.
On gloo, each message has a header (`message_header.py`) with the number of its call and a digest of
the call's arguments.
"""

"""Messages between two ranks: posting them, waiting for them, numbering and checking them.

Start with `comm.py`. `Comm` is a rank's view of its group, and `Comm.start` posts messages. On
gloo each message has a header (`message_header.py`) with the number of its call and a digest of the
call's arguments.
"""

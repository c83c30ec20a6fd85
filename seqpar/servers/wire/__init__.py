"""The messages between a pool and its attention servers, whatever transport they use.

A request consists of a *header*, which has the sizes and options of a task, and a *payload*, the
bytes of the task's tensors. Start with `messages.py`, which has the headers. `codec.py` converts a
request to a header and a payload, and back. `versions.py` converts a header to the messages of
`attention.proto`, and back. `limits.py` has the limits of what servers and pools accept.
"""

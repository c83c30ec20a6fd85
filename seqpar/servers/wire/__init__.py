"""The messages between a pool and its attention servers, whatever transport they use.

A request consists of a *header*, which contains the sizes and options of a task, and a *payload*,
the bytes of the task's tensors. Start with `messages.py`, which defines the headers. `codec.py`
converts a request to a header and a payload, and back. `versions.py` converts a header to the
messages of `attention.proto`, and back. `limits.py` defines what servers and pools accept.
"""

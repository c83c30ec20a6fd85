"""Rows of tensors as messages.

Start with `row_messages.py`, which says which rows a message has, and makes messages of several
tensors. `message_dtypes.py` encodes rows in 8 bits, and `message_buffers.py` reuses memory.
"""

"""Messages that contain rows of tensors.

Start with `row_messages.py`, which selects the rows of a message and puts several tensors into one
message.
"""

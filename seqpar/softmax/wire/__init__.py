"""Rows of tensors as messages: several tensors packed in one, and 8-bit rows.

Start with `row_messages.py`.
"""

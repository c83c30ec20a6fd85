"""Cuts: rules that assign spans of documents to ranks, such as contiguous, zigzag and striped.

Start with `cut.py`, which defines the protocol `Cut`.
"""

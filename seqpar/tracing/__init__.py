"""Traces of computation, messages and waits, and the communication that compute does not hide.

Start with `trace.py`.
"""

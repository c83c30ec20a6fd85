"""Traces of computation, messages and waits, and communication that computation does not hide.

Start with `trace.py`.
"""

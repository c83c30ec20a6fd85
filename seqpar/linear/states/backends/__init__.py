"""Compute linear attention over spans, each backend in its own way."""

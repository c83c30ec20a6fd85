"""Compute softmax attention over slices, each backend in its own way."""

"""Backends of the recurrent primitive, each in its file."""

"""Backends of the recurrent primitive, one a file."""

"""Benchmarks of recurrent attention."""

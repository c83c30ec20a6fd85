"""Sweeps: measure strategies and their peers over lengths, heads, masks and ranks."""

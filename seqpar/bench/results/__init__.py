"""The results of a sweep: files, tables, plots, and a gate that fails when a figure gets worse.

Start with `results.py`.
"""

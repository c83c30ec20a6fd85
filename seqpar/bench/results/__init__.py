"""The results of a sweep: the file, tables, plots, and thresholds that figures must keep.

Start with `results_file.py`.
"""

"""The results of a sweep: the results file, tables, plots, and thresholds for figures.

Start with `results_file.py`.
"""

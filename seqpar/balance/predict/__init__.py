"""Predict the duration and the memory of a batch under a given assignment.

Start with `prediction.py`.
"""

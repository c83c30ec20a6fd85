"""Predict the time and memory of a batch whose documents were assigned to ranks.

Start with `prediction.py`.
"""

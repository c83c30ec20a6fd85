"""The arithmetic on one rank that all strategies of softmax attention share.

Start with `partial.py`, which stores and merges results of attention, and adds up gradients.
"""

"""Draw one strategy on a batch and a cluster as a page whose address contains all its options.

Start with `question.py`, which defines the options and simulates the call.
"""

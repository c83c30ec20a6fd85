"""Draw one strategy on a batch and a cluster as a page whose address contains all its options.

Start with `answer.py`, which simulates the options of `question.py`.
"""

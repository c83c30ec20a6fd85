"""Arithmetic on one rank that all strategies share.

Start with `partial.py`, which has partial results (out, lse), how they are merged, and sums of
gradients. `call_options.py` has the options of scores such as ALiBi, and `max_logits.py` the
largest scores.
"""

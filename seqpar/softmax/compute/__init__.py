"""The arithmetic on one rank that all strategies of softmax attention share.

Start with `partial.py`, which stores and merges partial results (out, lse), and adds up gradients.
`call_options.py` has the options that determine scores, such as ALiBi. `max_logits.py` computes the
largest scores.
"""

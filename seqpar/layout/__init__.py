"""Layouts and masks: which rank holds which tokens, and which query attends to which key.

Start with `layout.py`, which defines the class that users create, and `geometry.py`, which holds a
layout's content as arrays for all other code.

Words that this package uses:

* The *pack* is the packed batch: T tokens, cut into documents.
* A *span* is a range of positions of one document, all held by one rank.
* A *cut* is the rule that assigns spans to ranks, such as zigzag.
* A *row* is the index of a token among the tokens of one rank.
"""

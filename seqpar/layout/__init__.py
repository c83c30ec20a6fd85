"""Layouts and masks. A layout assigns tokens to ranks, and a mask says which query attends to which
key.

Start with `layout.py`, which has the class that users create. `geometry.py` has the content of a
layout as arrays, which all other code reads.

This package uses these words:

* The *pack* is the packed batch: a sequence of T tokens, which is cut into documents.
* A *position* is the index of a token in its document.
* A *span* is a range of positions of one document that one rank holds.
* A *cut* is the rule that assigns spans to ranks, such as zigzag.
* A *row* is the index of a token among the tokens of one rank.
"""

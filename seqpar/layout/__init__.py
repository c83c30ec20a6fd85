"""Layouts, which assign tokens to ranks, and masks, which say which query attends to which key.

Start with `layout.py`, which has the class that users create. `geometry.py` stores the content of a
layout as arrays. All other files read these arrays.

This package uses these words:

* The *pack* is the packed batch: a sequence of T tokens, which is cut into documents.
* A *position* is the index of a token in its document.
* A *span* is a range of positions of one document that one rank holds.
* A *cut* is a rule that assigns spans to ranks, such as zigzag.
* The tokens on a rank are ordered by document, and within a document by position. A *row* is the
  index of a token in this order.
* A *run* is all tokens of one document on one rank. A run consists of one or more spans, and its
  rows are consecutive.
"""

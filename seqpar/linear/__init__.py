"""Linear attention, from plain linear attention to Kimi Delta Attention.

Start with `kinds.py`, which has the table of kinds. This package uses these words:

* A *state* is a matrix for each head, which summarises all earlier tokens of a document.
* A *span* is a range of consecutive tokens of a document on one rank. The state before the span
  *enters* the span, and the state after the span *leaves* the span.
* The *transition* of a span is the factor by which the span multiplies the entering state.
* A *pass* is the forward or the backward computation of a call.

The folder `states/` is for calls with a constant decay. All ranks know the transitions of these
calls from the layout. The folder `maps/` is for calls whose transitions depend on the data. The
files of this folder are for all kinds.
"""

"""Tokens are exchanged for heads: the common code of Ulysses and USP.

Start with `exchange.py`. `groups.py` divides heads among ranks, and `row_order.py` sorts the rows
that arrive into documents.
"""

"""Tokens are exchanged for heads: the common code of Ulysses and USP.

Start with `exchange.py`. `messages.py` packs messages and brings the rows that arrive into the
order of documents.
"""

"""Tokens are exchanged for heads: the common code of Ulysses and USP.

Start with `head_exchange.py`. `head_messages.py` packs messages and brings the rows that arrive
into the order of documents.
"""

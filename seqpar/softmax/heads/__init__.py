"""Ulysses and USP: ranks exchange tokens for heads.

Start with `head_exchange.py`, which plans and carries out the exchange. `head_messages.py` packs
tensors into messages, and puts rows that arrive into the order of documents.
"""

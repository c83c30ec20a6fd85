"""The exchange of heads in Ulysses and USP.

Start with `head_exchange.py`, which plans and carries out the exchange. `head_messages.py` packs
tensors into messages, and puts rows that arrive into the order of documents.
"""

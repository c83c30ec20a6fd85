"""Ulysses and USP: each rank receives some heads of the tokens of several ranks.

Start with `head_exchange.py`, which plans the exchange and sends its messages.
"""

"""A batch of a transformers model, divided among ranks: documents, positions, padding and labels.

Start with `sharding.py`.
"""

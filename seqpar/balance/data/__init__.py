"""Batches for trainers.

`batches.py` reads documents in the order of a plan, and `collate.py` packs them into tensors.
"""

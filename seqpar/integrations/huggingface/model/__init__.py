"""Inspection of a transformers model: its layers, their code, and its configuration.

Start with `layers.py`.
"""

"""A transformers model's layers and their code. Start with `layers.py`."""

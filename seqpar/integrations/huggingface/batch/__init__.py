"""A batch of a transformers model, divided among ranks. Start with `sharding.py`."""

"""Trainers of transformers and TRL with groups of ranks. Start with `trainer.py`."""

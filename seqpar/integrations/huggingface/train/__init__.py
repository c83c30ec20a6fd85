"""transformers' Trainer, TRL's SFTTrainer and accelerate with groups of ranks.

Start with `trainer.py`.
"""

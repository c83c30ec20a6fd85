"""Simulate whole training steps, also with pipelines or attention servers.

Start with `training_step.py`.
"""

"""Simulate whole training steps.

This covers the layers of a model, traffic that overlaps them, pipelines, and trainers with
attention servers. Start with `training_step.py`.
"""

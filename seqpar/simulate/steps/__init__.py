"""Simulate whole training steps.

A simulated step has the layers of a model, and messages that overlap these layers. A pipeline or
attention servers can be simulated too. Start with `training_step.py`.
"""

"""A whole training step: the layers of a model, what travels next to attention, pipelines, and
trainers with attention servers.

Start with `steps.py`.
"""

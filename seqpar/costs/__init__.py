"""Descriptions of a cluster and a model, and what work and messages cost on them."""

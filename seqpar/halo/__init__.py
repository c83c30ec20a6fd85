"""Layers that need the few tokens before each token: short causal convolutions and token shifts."""

"""Attention servers: processes of their own that compute tasks of attention for many trainers."""

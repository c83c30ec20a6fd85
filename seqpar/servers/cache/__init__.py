"""A cache of keys and values that lives on attention servers.

Start with `server_cache.py`.
"""

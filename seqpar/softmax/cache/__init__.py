"""Keys and values that stay on their ranks and grow while tokens are generated.

Start with `sharded_cache.py`.
"""

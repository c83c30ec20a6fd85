"""A cache of keys and values that attention servers store, for decoding.

Start with `server_cache.py`, the public class. It has one `LayerCache` per layer
(`layer_cache.py`), which consists of segments; a segment sends its steps to one server.
"""

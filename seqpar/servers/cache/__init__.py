"""Caches of keys and values for decoding, which attention servers store.

Start with `server_cache.py`, the public class. A `ServerCache` has one `LayerCache`
(`layer_cache.py`) for each layer of the model. A `LayerCache` consists of segments. One server
stores a segment, and computes attention over it.
"""

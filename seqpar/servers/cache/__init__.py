"""Caches of keys and values for decoding, which attention servers store.

Start with `server_cache.py`, the public class. A `ServerCache` has one `LayerCache`
(`layer_cache.py`) for each layer of the model. A `LayerCache` consists of *segments*, which are
ranges of consecutive tokens. Each segment is stored on one server, and this server computes
attention over the segment.
"""

"""`generate` over ranks: its cache and its calls. Start with `generating.py`."""

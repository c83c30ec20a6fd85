"""`generate` over ranks: its cache and its steps.

Start with `generating.py`.
"""

"""Methods that assign documents to ranks, one file for each published method.

Start with `zeppelin.py` or `bytescale.py`; `contiguous.py` and `zigzag.py` are the baselines.
"""

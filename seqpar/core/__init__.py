"""Helper code that does not depend on attention.

This package has argument checks, dtypes, caches of layout tables, hooks, and every private name of
torch that seqpar uses. Start with `memo.py`, which caches the tables of a layout for later calls.
If a new release of torch breaks something, read `torch_private.py`. `private_names.py` defines the
tables of private names, for torch and for other libraries.
"""

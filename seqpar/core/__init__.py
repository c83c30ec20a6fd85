"""Code that knows nothing about attention.

It has argument checks, dtypes, caches of layout tables, hooks, and every private name of torch that
seqpar uses. Start with `memo.py`, which keeps the tables that the next call with a layout uses
again. `torch_private.py` is the file to read when a new release of torch breaks something, and
`private_names.py` defines the tables of private names in that file and for other libraries.
"""

"""Softmax attention.

Start with `module.py`, which users call, and follow "The call stack of attention" on the
architecture page.
`attend.py` is the primitive that all strategies compute with. The folders `keys/`, `heads/`,
`queries/` and `tasks/` each have the common code of the strategies that move these.
"""

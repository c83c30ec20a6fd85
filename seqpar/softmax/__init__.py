"""Softmax attention.

Start with `module.py`, which has `Attention`, the module that users call. Then follow "The call
stack of attention" on the architecture page. All strategies compute with the functions of
`attend.py`. The folders `keys/`, `heads/`, `queries/` and `tasks/` are named for the tensors that a
strategy sends. They hold the code that strategies of this kind share.
"""

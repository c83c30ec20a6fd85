"""Softmax attention.

Start with `module.py`, which contains `Attention`, the module that users call. After that, follow
"The call stack of attention" on the architecture page. All strategies compute attention with the
functions of `attend.py`. The folders `keys/`, `heads/`, `queries/` and `tasks/` are named for what
a strategy sends. Each folder contains the code that strategies of this kind share.
"""

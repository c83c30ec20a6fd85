"""Trade time for memory.

`checkpointing.py` recomputes a block without its attention; `offload.py` keeps saved tensors in
host memory.
"""

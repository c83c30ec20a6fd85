"""Less memory for more work: `checkpointing.py` recomputes a block without its attention, and
`offload.py` keeps saved tensors in host memory."""

"""Trade time for memory: `checkpointing.py` recomputes, `offload.py` uses host memory."""

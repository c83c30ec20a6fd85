"""The levers of `enable(..., memory=...)`: a chunked loss, tiled modules, checkpoints, offload."""

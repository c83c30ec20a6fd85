"""What `enable(..., memory=...)` changes in a model: a chunked loss, tiled modules, checkpoints and
offload.
"""

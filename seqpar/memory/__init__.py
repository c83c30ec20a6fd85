"""Train with less memory.

`checkpointing.py` recomputes, `offload.py` uses host memory, `cross_entropy.py` never holds the
logits of all tokens, and `tiling.py` computes a module in chunks of tokens. `profiling.py` says
which tensors a step holds.
"""

from seqpar.memory.cross_entropy import (
    LogProbabilities,
    chunked_cross_entropy,
    chunked_log_probabilities,
)
from seqpar.memory.profiling import Holding, MemoryProfile, profile
from seqpar.memory.tiling import tiled

__all__ = [
    "Holding",
    "LogProbabilities",
    "MemoryProfile",
    "chunked_cross_entropy",
    "chunked_log_probabilities",
    "profile",
    "tiled",
]

"""Train with less memory.

`checkpointing.py` recomputes blocks, and `offload.py` keeps saved tensors in host memory.
`cross_entropy.py` never holds the logits of all tokens, and `tiling.py` computes a module in chunks
of tokens. `profiling.py` lists the tensors that a step holds.
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

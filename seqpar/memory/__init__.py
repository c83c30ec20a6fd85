"""Train with less memory.

`checkpointing.py` recomputes, `offload.py` uses host memory, `cross_entropy.py` never holds the
logits of all tokens, and `tiling.py` computes a module in chunks of tokens.
"""

from seqpar.memory.cross_entropy import (
    LogProbabilities,
    chunked_cross_entropy,
    chunked_log_probabilities,
)
from seqpar.memory.tiling import tiled

__all__ = ["LogProbabilities", "chunked_cross_entropy", "chunked_log_probabilities", "tiled"]

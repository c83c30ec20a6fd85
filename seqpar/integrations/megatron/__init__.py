"""Megatron-Core models over sequences too long for one device.

`sequence_parallel(spec, "ring")` replaces the core attention of a layer spec. Megatron-Core builds
the model from the result, and still distributes the tokens. Importing this package does not import
Megatron-Core. It is tested with Megatron-Core 0.19.2.

Start with `core_attention.py`. Megatron *deals* tokens to the ranks of its context-parallel group:
it cuts each *sequence*, which is a document, a row of the batch or the whole pack, into two chunks
for each rank.
"""

from seqpar.integrations.megatron.scheduler import PlanScheduler
from seqpar.integrations.megatron.spec import sequence_parallel

__all__ = ["PlanScheduler", "sequence_parallel"]

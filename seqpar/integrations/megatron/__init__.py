"""Megatron-Core models over sequences too long for one device.

`sequence_parallel(spec, "ring")` replaces the core attention of a layer spec. Megatron-Core builds
the model from the returned spec, and still distributes the tokens to the ranks. Importing this
package does not import Megatron-Core. The package is tested with Megatron-Core 0.19.2.

Start with `core_attention.py`. Megatron *deals* tokens to the P ranks of its context-parallel
group: it cuts each *sequence* into 2P equal chunks and gives two chunks to each rank. A sequence is
a document, a row of the batch or the whole pack, depending on Megatron's settings.
"""

from seqpar.integrations.megatron.scheduler import PlanScheduler
from seqpar.integrations.megatron.spec import sequence_parallel

__all__ = ["PlanScheduler", "sequence_parallel"]

"""Hugging Face transformers models over sequences too long for one device.

Call `sp = huggingface.enable(model, group, "ring")` once, and `model(**sp.shard(batch))` for each
batch. Importing this package does not import transformers.

Start with `session.py`, which defines `enable` and the *session* that it returns, `sp`. The *part*
of a rank is the tokens of a batch that the rank computes.
"""

from seqpar.integrations.huggingface.batch.collator import Collator
from seqpar.integrations.huggingface.generate.cache import Cache
from seqpar.integrations.huggingface.session import LayerReport, Report, SequenceParallel, enable
from seqpar.integrations.huggingface.train.trainer import trainer

__all__ = ["Cache", "Collator", "LayerReport", "Report", "SequenceParallel", "enable", "trainer"]

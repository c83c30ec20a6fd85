"""Hugging Face transformers models over sequences too long for one device.

`sp = huggingface.enable(model, group, "ring")`, then `model(**sp.shard(batch))`. Nothing here
imports transformers until it is called.

Start with `session.py`, which defines `enable` and the *session* that it returns, `sp`. The *part*
of a rank is the tokens of a batch that the rank computes.
"""

from seqpar.integrations.huggingface.batch.collator import Collator
from seqpar.integrations.huggingface.generate.cache import Cache
from seqpar.integrations.huggingface.session import LayerReport, Report, SequenceParallel, enable
from seqpar.integrations.huggingface.train.trainer import trainer

__all__ = ["Cache", "Collator", "LayerReport", "Report", "SequenceParallel", "enable", "trainer"]

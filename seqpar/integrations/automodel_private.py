"""The private names of NeMo Automodel that seqpar uses, each with a reason."""

from __future__ import annotations

from seqpar.core.private_names import PrivateNames, Use

AUTOMODEL = PrivateNames(
    "nemo_automodel",
    names={},
    attributes={
        "_owns_cp_attention": Use(
            "0.7",
            "to say that a model divides packed documents itself",
            named_in="nemo_automodel._transformers.capabilities.ModelSupports.supports_cp.fget",
        ),
        "_packed_seq_ids": Use(
            "0.7",
            "the key of a batch that numbers its documents",
            named_in="nemo_automodel.components.datasets.utils.neat_packed_collater",
        ),
    },
)
OWNS_ATTENTION = "_owns_cp_attention"
DOCUMENT_NUMBERS = "_packed_seq_ids"

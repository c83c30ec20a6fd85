"""Heads that compute one result for each row of a batch, from the last token of the row.

Such a head is a linear layer, `score`, that transformers applies to every token. Each rank applies
the layer to its own tokens. The ranks then gather all scores, and every rank selects the scores of
the rows' last tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from seqpar.comm.messages.comm import Comm
from seqpar.integrations.huggingface.attention.call import ModelCall, current


def keep_scores(score: Any, args: Any, scores: Tensor) -> None:
    if current.call is not None:
        current.call.scores = scores


def with_row_results(call: ModelCall, outputs: Any, comm: Comm) -> Any:
    """Return a call's outputs with the results of all rows, (B, labels), as their logits."""
    last, scores = call.sharding.last_tokens, call.scores
    if last is None:
        return outputs
    if scores is None or not isinstance(outputs, Mapping):
        found = type(outputs).__name__
        raise ValueError(f"model must return outputs by name from its head, got a {found}")
    whole = call.sharding.main.put_back(scores, comm).flatten(0, 1)
    return type(outputs)(**{**outputs, "logits": whole[last.to(whole.device)]})

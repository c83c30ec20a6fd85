"""Find the token of each row from which a head for whole rows answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.integrations.huggingface.batch.documents import BatchDocuments


def last_tokens(model: Any, batch: Mapping[str, Any], documents: BatchDocuments) -> Tensor:
    """Return each row's token that transformers classifies, (B,), among the B·S tokens.

    This is the row's last token that is not the model's padding token. It need not be the last
    token of the attention mask. For embeddings, and for models without a padding token, it is the
    token of the last column.

    Raises a ValueError if this token of a row is padding, or if the batch has several rows and the
    model's config has no token of padding.
    """
    ids, rows, columns = batch.get("input_ids"), documents.rows, documents.columns
    padding = model.config.get_text_config().pad_token_id
    if padding is None and rows > 1:
        what = "pad_token_id of the model's config must be set for a batch of several rows"
        raise ValueError(f"{what}, got None: the last tokens of rows are found by it")
    last = torch.full((rows,), columns - 1)
    if padding is not None and ids is not None:
        last = (torch.arange(columns, device=ids.device) * (ids != padding)).argmax(-1).cpu()
    found = last + columns * torch.arange(rows)
    outside = ~np.isin(found.numpy(), documents.kept)
    if outside.any():
        row = int(outside.argmax())
        what = f"the model would classify token {int(last[row])} of row {row}, which is padding"
        raise ValueError(f"attention_mask must cover the last token of each row: {what}")
    return found

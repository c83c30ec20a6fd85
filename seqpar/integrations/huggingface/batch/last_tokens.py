"""Find the token of each row from which a classifier of whole rows computes its result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.integrations.huggingface.batch.documents import BatchDocuments


def last_tokens(model: Any, batch: Mapping[str, Any], documents: BatchDocuments) -> Tensor:
    """Return (B,): for each row, the index of the token that is classified, among all B·S tokens.

    As in transformers, this is the last token of the row whose id is not the model's padding id.
    The attention mask is not used to find this token. If the batch has embeddings in place of ids,
    or the model has no padding id, it is the token of the last column.

    Raises a ValueError if the attention mask marks this token as padding, or if the batch has
    several rows and the model's config has no padding id.
    """
    ids, rows, columns = batch.get("input_ids"), documents.rows, documents.columns
    padding = model.config.get_text_config().pad_token_id
    if padding is None and rows > 1:
        what = "pad_token_id of the model's config must be set for a batch of several rows"
        raise ValueError(f"{what}, got None: seqpar finds the last token of a row by this number")
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

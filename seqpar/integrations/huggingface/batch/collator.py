"""Pack samples into one row, for models that run over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.core.arguments import shown
from seqpar.integrations.huggingface.batch.shard_batch import ModelPreparation

_IGNORED_LABEL = -100  # the label of tokens without a loss
_MASKS = ("completion_mask", "assistant_masks")  # 1 for tokens with a loss, 0 for others
COLUMNS = (
    "text",
    "input_ids",
    "labels",
    "attention_mask",
    *_MASKS,
)  # of a dataset that `Collator` reads


class Collator:
    """Pack samples into one row without padding, as `data_collator=Collator(tokenizer)`.

    A sample has `input_ids`, or `text` for the tokenizer, and may have `labels`, one per token; by
    default its tokens are the labels. `text` is dropped if there are `input_ids`. Tokens with
    `attention_mask` 0 are dropped. Tokens with `completion_mask` or `assistant_masks` 0 get the
    label −100. Other values with one entry per token in every sample are packed too, if they are
    tensors, numpy arrays or lists of numbers; all other values become lists.

    Args:
        tokenizer: a transformers tokenizer, called for samples with `text`; may be None.
        max_length: the number of tokens to which each sample is cut.
        cu_seqlens: whether to add `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and
            `max_length_k`, as padding-free collators do.
        prepare: the result of `sp.preparation(…)` on this rank. The row then also has a `layout`,
            a `seqpar.Layout` that carries its attention tables, and `sp.shard` uses it. The
            workers of a DataLoader thus build the tables ahead of the step.

    Returns:
        of a call: `input_ids`, `labels` and `position_ids`, each (1, T). The positions show where
        samples begin. The first label of each sample is −100, since no token comes before it.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        *,
        max_length: int | None = None,
        cu_seqlens: bool = False,
        prepare: ModelPreparation | None = None,
    ) -> None:
        if prepare is not None and not isinstance(prepare, ModelPreparation):
            raise ValueError(f"prepare must be a result of sp.preparation, got {shown(prepare)}")
        if max_length is not None and (not isinstance(max_length, int) or max_length < 1):
            raise ValueError(f"max_length must be None or at least 1, got {max_length!r}")
        self._tokenizer, self._most, self._cu_seqlens = tokenizer, max_length, cu_seqlens
        self._prepare = prepare

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        samples = [self._sample(feature) for feature in features]
        places = [x.pop("attention_mask").nonzero()[: self._most, 0] for x in samples]
        lengths = list(map(len, places))
        if not sum(lengths):
            raise ValueError("features must have tokens, got none")
        names = samples[0].keys()
        for sample in samples:
            if sample.keys() != names:
                differ = sorted(sample.keys() ^ names)
                raise ValueError(f"features must have the same keys, got some without {differ}")
        made: dict[str, Any] = {}
        for name in names:
            made[name] = [sample[name] for sample in samples]
            # A value of fixed length may be as long as one sample, but not as long as each of them.
            if all(_length(sample[name]) == sample["input_ids"].numel() for sample in samples):
                each = zip(made[name], places, strict=True)
                # Empty samples are left out: torch would take an empty list for float32.
                parts = [torch.as_tensor(x)[kept] for x, kept in each if len(kept)]
                made[name] = torch.cat(parts)[None]
        made["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
        if self._cu_seqlens:
            ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
            made |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
            made |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
        if self._prepare is not None:
            made["layout"] = self._prepare([0, *accumulate(filter(None, lengths))])
        return made

    def _sample(self, feature: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(feature)
        if "input_ids" not in values:
            if self._tokenizer is None or "text" not in values:
                raise ValueError("features must have input_ids, or text if there is a tokenizer")
            values |= self._tokenizer(values.pop("text"), return_attention_mask=False)
        ids = torch.as_tensor(values.pop("input_ids"))
        if ids.dim() != 1:
            raise ValueError(f"input_ids must be (tokens,), got {tuple(ids.shape)}")
        labels = torch.as_tensor(values.pop("labels", ids)).clone()
        if labels.shape != ids.shape:
            raise ValueError(f"labels must be {tuple(ids.shape)}, got {tuple(labels.shape)}")
        for name in _MASKS:
            if (learned := values.pop(name, None)) is not None:
                labels[_mask(name, learned, ids) == 0] = _IGNORED_LABEL
        mask = values.pop("attention_mask", None)
        kept = torch.ones_like(ids) if mask is None else _mask("attention_mask", mask, ids)
        labels[kept.nonzero()[:1]] = _IGNORED_LABEL
        for name in ("text", "position_ids", "seq_lengths", "length"):
            values.pop(name, None)
        return {"input_ids": ids, "labels": labels, "attention_mask": kept, **values}


def _mask(name: str, mask: Any, ids: Tensor) -> Tensor:
    mask = torch.as_tensor(mask)
    if mask.shape != ids.shape:
        raise ValueError(f"{name} must be {tuple(ids.shape)}, got {tuple(mask.shape)}")
    return mask


def _length(value: Any) -> int:
    """Return the length of a sequence of numbers, and −1 for any other value."""
    if isinstance(value, Tensor):
        return value.shape[0] if value.dim() else -1
    if isinstance(value, np.ndarray):
        return len(value) if value.ndim and value.dtype.kind in "biuf" else -1
    numbers = isinstance(value, list | tuple) and all(isinstance(x, int | float) for x in value)
    return len(value) if numbers else -1

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

    A sample has `input_ids`, or `text` for the tokenizer; `text` is ignored if there are
    `input_ids`. A sample can also have `labels`, one per token; without them, the tokens are the
    labels. Tokens whose `attention_mask` is 0 are dropped. Tokens whose `completion_mask` or
    `assistant_masks` is 0 get the label −100.

    All other values are packed too if they are tensors, numpy arrays or lists of numbers and have
    one entry per token in every sample. Values that do not fit are returned as lists, with one
    entry per sample.

    Args:
        tokenizer: a transformers tokenizer for samples with `text`. None if no sample has `text`.
        max_length: the number of tokens to which each sample is cut.
        cu_seqlens: whether to add `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and
            `max_length_k`, as padding-free collators do.
        prepare: the result of `sp.preparation(…)` on this rank. The row then has a key `layout`: a
            `seqpar.Layout` with the tables of attention, which `sp.shard` uses. With workers of a
            DataLoader, the tables are built in other processes, before the step.

    Returns:
        When called: a dictionary with `input_ids`, `labels` and `position_ids`, each (1, T).
        Positions begin at 0 in each sample. The first label of each sample is −100, because no
        token of the sample predicts it.
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
            # A value of a fixed length can have as many entries as one sample has tokens, but
            # rarely as many as every sample.
            if all(_length(sample[name]) == sample["input_ids"].numel() for sample in samples):
                each = zip(made[name], places, strict=True)
                # Empty samples are left out, because torch would convert an empty list to float32.
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
    if isinstance(value, Tensor):
        return value.shape[0] if value.dim() else -1
    if isinstance(value, np.ndarray):
        return len(value) if value.ndim and value.dtype.kind in "biuf" else -1
    numbers = isinstance(value, list | tuple) and all(isinstance(x, int | float) for x in value)
    return len(value) if numbers else -1

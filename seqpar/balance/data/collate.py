"""Read the tokens of a step that one rank holds, with their labels and other values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from seqpar.balance.planning.micro_batch import MicroBatch
from seqpar.balance.planning.plans import Plan
from seqpar.core.arguments import as_int, shown
from seqpar.core.compiling import outside_graphs
from seqpar.layout.labels import shift_labels

LocalBatch = dict[str, Any]  # what a rank holds of a micro-batch, by key
MADE = ("position_ids", "layout", "documents", "loss_weight")  # keys that documents must not have


class Documents(Protocol):
    """A dataset: item i is a document's token ids, or a mapping with the ids as "input_ids"."""

    def __getitem__(self, index: int, /) -> object: ...


@outside_graphs
def collate(
    plan: Plan,
    dataset: Documents,
    rank: int,
    *,
    label_tokens: int | None = None,
    per_token: Collection[str] | None = None,
) -> list[LocalBatch]:
    """Return one dict per micro-batch of a plan, with the tokens that this rank holds.

    Tensors are on the CPU, in the layout's local order. The keys are:

    * "input_ids" and "position_ids", (T_local,) int64;
    * "labels", (T_local,) int64: the next token of the document, or −100 at the document's end. If
      documents have "labels", one for each token, "labels" is the label of the next token instead;
    * "layout": the `seqpar.Layout` to give to attention;
    * "documents": (n,) int64, the indices of the documents of which the rank has tokens;
    * "loss_weight": 1 divided by the number of labels in the step, on all ranks and in all
      micro-batches. The sum of the losses of all labels, times this weight, is the mean loss. If
      DDP or FSDP averages gradients over the ranks, multiply the loss by the number of ranks;
    * all further keys of the documents. A tensor, array or list with one entry per token is cut
      like the tokens. All other values are collected in a list, with one entry for each document in
      "documents".

    Only documents of which the rank has tokens are read. If the rank has no tokens in a
    micro-batch, the micro-batch's first document is read for its keys. The rank must still compute
    that micro-batch, because other ranks wait for its messages.

    Args:
        plan: the plan, whose documents are indices into the dataset.
        rank: this rank.
        label_tokens: the number of labels in the step, on all ranks together. It is required if
            documents have labels of −100. By default, it is the number of all tokens except the
            last token of each document.
        per_token: the further keys whose values have one entry per token. By default, these are all
            keys of which each value has as many entries as the value's document has tokens, even if
            the numbers are equal only by chance.

    Raises a ValueError that names a document whose length differs from the plan.
    """
    if not isinstance(plan, Plan):
        raise ValueError(f"plan must be a balance.Plan, got {shown(plan)}")
    rank = as_int("rank", rank, 0, plan.ranks - 1)
    masked = label_tokens is not None
    if label_tokens is None:
        label_tokens = sum(int((x.lengths - 1).sum()) for x in plan.micro_batches)
    weight = 1.0 / max(1, as_int("label_tokens", label_tokens, 0))
    if isinstance(per_token, str) or not isinstance(per_token, Collection | None):
        raise ValueError(f"per_token must be a collection of keys, got {shown(per_token)}")
    found: list[LocalBatch] = []
    for batch in plan.micro_batches:
        made = {"loss_weight": weight, "layout": batch.layout}
        if batch.documents.size or not found:
            made |= _read(batch, dataset, rank, masked, per_token)
        else:  # an empty micro-batch gets the keys of the first micro-batch
            made |= {name: x[:0] for name, x in found[0].items() if name not in made}
        found.append(made)
    return found


def _read(
    batch: MicroBatch, dataset: Documents, rank: int, masked: bool, by_token: Collection[str] | None
) -> LocalBatch:
    spans: dict[int, list[slice]] = {}
    for document, start, stop in batch.layout.spans(rank):
        spans.setdefault(document, []).append(slice(start, stop))
    read = spans or {document: [] for document in range(len(batch.documents[:1]))}
    lengths = batch.lengths[list(read)].tolist()
    numbers = batch.documents[list(read)].tolist()
    items = [_document(dataset, *of, masked, by_token) for of in zip(numbers, lengths, strict=True)]
    for number, item in zip(numbers, items, strict=True):
        if item.keys() != items[0].keys():
            names = sorted(item.keys() ^ items[0].keys())
            pair = f"{numbers[0]} and {number}"
            raise ValueError(
                f"dataset must give all documents the same keys: {pair} differ in {names}"
            )
    made: LocalBatch = {name: torch.zeros(0, dtype=torch.int64) for name in ("input_ids", "labels")}
    for name in items[0] if items else ():
        values = [item[name] for item in items]
        cut = by_token is not None and name in by_token
        if by_token is None or name in ("input_ids", "labels"):
            cut = all(map(_per_token, values, lengths))
        made[name] = values if spans else []
        if cut:
            parts = zip(values, read.values(), strict=True)
            held = [x[part] for x, parts_of_x in parts for part in parts_of_x]
            made[name] = torch.cat(held) if held else values[0][:0]
    made["position_ids"] = batch.layout.position_ids(rank)
    made["documents"] = torch.from_numpy(batch.documents[list(spans)])
    return made


def _per_token(value: object, length: int) -> bool:
    return isinstance(value, Tensor) and value.shape[:1] == (length,)


def _document(
    dataset: Documents, index: int, length: int, masked: bool, per_token: Collection[str] | None
) -> LocalBatch:
    """Return a document's values by key. Numeric values are converted to tensors, and labels are
    shifted.
    """
    found = dataset[index]
    item: LocalBatch = dict(found) if isinstance(found, Mapping) else {"input_ids": found}
    if "input_ids" not in item:
        raise ValueError(f"dataset: document {index} must have input_ids, got {sorted(item)}")
    for name in MADE:
        if name in item:
            raise ValueError(
                f"dataset: document {index} must not have {name}, which collate makes: rename it"
            )
    item = {name: _as_tensor(value) for name, value in item.items()}
    for name in per_token or ():
        if not _per_token(value := item.get(name), length):
            size = tuple(value.shape) if isinstance(value, Tensor) else shown(value)
            wanted = f"an entry for each of {length} tokens, as per_token says, got {size}"
            raise ValueError(f"dataset: {name} of document {index} must have {wanted}")
    for name in ("input_ids", "labels"):
        value = item.get(name, item["input_ids"])
        if not isinstance(value, Tensor) or value.shape != (length,) or value.is_floating_point():
            size = tuple(value.shape) if isinstance(value, Tensor) else shown(value)
            wanted = f"({length},) integers, as planned"
            raise ValueError(f"dataset: {name} of document {index} must be {wanted}, got {size}")
        item[name] = value.long()
    if not masked and (item["labels"] < 0).any():
        way_out = "pass label_tokens, the number of labels in the step that are not -100"
        raise ValueError(f"dataset: document {index} has labels that do not count: {way_out}")
    item["labels"] = shift_labels(item["labels"], length)
    return item


def _as_tensor(value: object) -> object:
    if isinstance(value, np.ndarray | list | tuple):
        # Strings and ragged lists cannot be converted.
        with suppress(TypeError, ValueError, RuntimeError):
            return torch.as_tensor(value)
    return value

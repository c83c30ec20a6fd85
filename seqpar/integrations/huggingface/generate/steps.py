"""The arguments of calls with a cache: a sharded prefill, and the decoding steps after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from seqpar.comm.messages.exchange import Comm
from seqpar.integrations.huggingface.batch.documents import BatchDocuments, shape_of
from seqpar.integrations.huggingface.batch.sharding import Sharding, Side
from seqpar.integrations.huggingface.generate.cache import Cache
from seqpar.integrations.huggingface.model.code import default_positions
from seqpar.layout.layout import Layout


@dataclass(frozen=True, eq=False)
class DecodingStep(Side):
    """A step's tokens, B rows of T in one row as in a prefill, so layers get one kind of call.

    They are the same on every rank. `layout` is the prefill's, and does not contain these tokens.
    """

    def put_back(self, x: Tensor, comm: Comm) -> Tensor:
        """Return the tokens in their rows, (1, B·T, …) -> (B, T, …)."""
        return x[0].unflatten(0, self.shape)


@dataclass(frozen=True, eq=False)
class Kept:
    """The last tokens of each row, whose logits a call returns, and the ranks that hold them."""

    rows: int
    index: Tensor  # places of this rank's kept tokens among the tokens that it computes
    layout: Layout | None  # the layout of the kept tokens; None: every rank has all

    def put_back(self, logits: Tensor, comm: Comm) -> Tensor:
        """Return the logits of all rows, (1, kept here, V) -> (B, kept, V)."""
        if logits.shape[1] != self.index.numel():
            logits = logits[:, self.index]
        packed = logits[0] if self.layout is None else self.layout.unshard(logits[0], comm)
        return packed.unflatten(0, (self.rows, -1))


def begun(side: Side) -> tuple[Layout, Any]:
    """Return a prefill's layout without padding, and the padding (B,), which is on the left."""
    documents = side.documents
    lengths = np.diff(documents.by_rows().cu_seqlens)
    if not np.array_equal(documents.by_rows().cu_seqlens, documents.cu_seqlens):
        if not lengths.all():
            raise ValueError("attention_mask must leave each row a token")
        reason = "a cache has one sequence in each row"
        raise ValueError(f"position_ids must not restart within a row: {reason}")
    last = np.arange(1, documents.rows + 1) * documents.columns - 1
    if not np.isin(last, documents.kept).all():
        reason = "new tokens follow a row's last one"
        raise ValueError(f"attention_mask must have its padding on the left: {reason}")
    of_rank = [
        [span for span in side.layout.spans(rank) if span.document < documents.rows]
        for rank in range(side.layout.ranks)
    ]
    return Layout.from_spans(of_rank, documents.cu_seqlens), documents.columns - lengths


def kept_of_prefill(layout: Layout, rank: int, count: int, device: torch.device) -> Kept | None:
    """Return the last `count` tokens of each row; None for all logits, if a row is shorter."""
    lengths = np.diff(layout.cu_seqlens)
    if not count or count > lengths.min():
        return None
    first = lengths - count
    spans = [
        [
            (i, max(start, first[i]) - first[i], stop - first[i])
            for i, start, stop in layout.spans(peer)
            if stop > first[i]
        ]
        for peer in range(layout.ranks)
    ]
    documents = np.searchsorted(layout.cu_seqlens, layout.token_indices(rank).numpy(), "right") - 1
    here = layout.position_ids(rank).numpy() >= first[documents]
    index = torch.from_numpy(np.flatnonzero(here)).to(device)
    return Kept(lengths.size, index, Layout.from_spans(spans, np.arange(lengths.size + 1) * count))


def to_step(
    model: nn.Module, cache: Cache, kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], Sharding, Kept | None]:
    """Return a step's arguments in one row, their sharding, and `Kept`; refuse other arguments."""
    made = dict(kwargs)
    names = ("input_ids", "inputs_embeds")
    given = [name for name in names if isinstance(made.get(name), Tensor)]
    rows, past = cache.batch_size, cache.get_seq_length()
    x = made[given[0]] if len(given) == 1 else None
    if x is None or x.dim() < 2 or x.shape[0] != rows or not x.shape[1]:
        found = "both or none" if x is None else tuple(x.shape)
        raise ValueError(f"input_ids must be ({rows}, T), new tokens of the cache's rows: {found}")
    tokens = x.shape[1]
    mask = made.pop("attention_mask", None)
    _check_mask(cache, mask, tokens)
    positions = made.pop("position_ids", None)
    if positions is None:
        whole = {"inputs_embeds": x} | ({} if mask is None else {"attention_mask": mask})
        positions = default_positions(model, whole, rows, past + tokens)[:, past:]
    if tuple(positions.shape[-2:]) not in ((rows, tokens), (1, tokens)):
        raise ValueError(f"position_ids must be ({rows}, {tokens}), got {tuple(positions.shape)}")
    positions = positions.expand(*positions.shape[:-2], rows, tokens)
    count = made.pop("logits_to_keep", None) or 0
    for name, value in made.items():
        if isinstance(value, Tensor) and tuple(value.shape[:2]) == (rows, tokens):
            made[name] = value.flatten(0, 1)[None]
    made["position_ids"] = positions.flatten(-2)[..., None, :]
    cu_seqlens = np.arange(rows + 1) * tokens
    documents = BatchDocuments(rows, tokens, np.arange(rows * tokens), cu_seqlens)
    index = torch.arange(rows * tokens, device=x.device)
    assert cache.layout is not None
    last = int(positions.max())
    side = DecodingStep(documents, cache.layout, index, made["position_ids"], last)
    kept = None
    if 0 < count < tokens:
        kept = Kept(rows, index.view(rows, tokens)[:, tokens - count :].flatten(), None)
    return made, Sharding(side), kept


def _check_mask(cache: Cache, mask: Any, tokens: int) -> None:
    if mask is None:
        return
    rows, columns = cache.batch_size, cache.get_seq_length() + tokens
    if not isinstance(mask, Tensor) or tuple(mask.shape) != (rows, columns):
        raise ValueError(f"attention_mask must be ({rows}, {columns}), got {shape_of(mask)}")
    left = torch.zeros(rows) if cache.padding is None else cache.padding
    real = torch.arange(columns, device=mask.device) >= left.to(mask.device)[:, None]
    if not torch.equal(mask.bool(), real):
        raise ValueError("attention_mask must have the prefill's padding, and no other")

"""Cut batches into what each rank computes."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from seqpar.comm.exchange import Comm
from seqpar.integrations.huggingface.documents import Documents, find_documents
from seqpar.integrations.huggingface.positions import default_positions
from seqpar.integrations.huggingface.sharding import KEY, Sharding, Side, digest_of, side_of
from seqpar.layout.labels import shift_labels
from seqpar.layout.layout import Layout

# What says documents: the layout has them from then on.
_DOCUMENTS = (
    "attention_mask",
    "decoder_attention_mask",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
)
_WHOLE = ("attention_mask", "position_ids")  # which models need with a whole batch
_MADE = (*_DOCUMENTS, "labels", "shift_labels", "position_ids")
_TEXT = (*_MADE, "input_ids", "inputs_embeds")


class Cutter:
    """What cuts one model's batches.

    `kind` names the layouts that it makes; `shifts` says whether labels are next tokens, and None
    that the model takes no labels. A model `with_images` is given batches whole that have more than
    text.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        kind: str,
        shifts: bool | None,
        with_encoder: bool,
        with_images: bool,
    ) -> None:
        self._model, self._comm, self._kind = model, comm, kind
        self._shifts, self._with_encoder = shifts, with_encoder
        self._with_images = with_images
        self._takes = set(inspect.signature(type(model).forward).parameters)

    def shared(self, batch: Any) -> dict[str, Any]:
        """Return what must be the same on all ranks of a batch: they all have it whole."""
        if not isinstance(batch, Mapping):
            return {}
        names = ["input_ids", "labels", "attention_mask", "position_ids"]
        names += ["token_type_ids", "mm_token_type_ids"]  # which say what sees itself
        described = {f"batch[{name!r}]": digest_of(batch.get(name)) for name in names}
        return {"keys of batch": sorted(map(str, batch)), **described}

    def shard(self, batch: Mapping[str, Any], layout: Any = None) -> Any:
        """Return the batch with this rank's tokens alone, and with a Sharding under `KEY`.

        Tensors (B, S, …) become (1, T_local, …), in the layout's local order and without padding;
        labels are shifted first. Everything else is carried through. With images beside the text,
        what the model takes stays whole, but for labels: its text takes its tokens itself.
        """
        if not isinstance(batch, Mapping):
            raise ValueError(f"batch must be a mapping, got {type(batch).__name__}")
        if KEY in batch:
            raise ValueError("batch must be whole: it was sharded before")
        layout = _layout_of(layout)
        if not self._with_encoder:
            main = self._side(batch, "", layout)
            if self._with_images and any(self._is_beside(main, *item) for item in batch.items()):
                return self._cut(batch, Sharding(main, whole=True), {"": main})
            return self._cut(batch, Sharding(main, None, None), {"": main})
        if layout is not None:
            raise ValueError("layout must be None for a model with an encoder, which needs two")
        batch = self._with_decoder_tokens(batch)
        encoder, main = self._side(batch, "", None), self._side(batch, "decoder_", None)
        return self._cut(batch, Sharding(main, encoder, None), {"": encoder, "decoder_": main})

    def count(self, batch: Mapping[str, Any]) -> int | None:
        """Return how many labels of a whole batch count, on all ranks together."""
        if self._with_encoder:
            batch = self._with_decoder_tokens(batch)
        _, documents = self._documents(batch, "decoder_" if self._with_encoder else "")
        labels = self._labels(batch, documents)
        return None if labels is None else _counted(labels, documents)

    def check(self, kwargs: Mapping[str, Any], sharding: Sharding) -> None:
        """Raise a ValueError if a call has other arguments than what `shard` returned may have."""
        for name, reason in _REFUSED.items():
            if kwargs.get(name) is None:
                continue
            if sharding.whole and name == "attention_mask":
                sharding.main.documents.check_mask(kwargs[name])
            elif kwargs[name] is not False:
                raise ValueError(f"{name} must not be given: {reason}")
        if kwargs.get("return_dict") is False:
            raise ValueError("return_dict must be True: outputs are found by their names")
        main, inputs = sharding.main, sharding.encoder or sharding.main
        expected = dict.fromkeys(("labels", "decoder_input_ids"), (1, main.tokens))
        expected["input_ids"] = main.shape if sharding.whole else (1, inputs.tokens)
        for name, shape in expected.items():
            x = kwargs.get(name)
            if x is not None and tuple(x.shape[:2]) != shape:
                reason = "all tensors must go through shard"
                raise ValueError(f"{name} must be {shape}, got {tuple(x.shape)}: {reason}")
        if kwargs.get("labels") is not None and sharding.labels is None:
            raise ValueError("labels must go through shard, which shifts them before it cuts them")
        by_shard = sharding.encoder is None and not sharding.whole
        if by_shard and kwargs.get("position_ids") is None:
            raise ValueError("position_ids must be those that shard returned, got none")

    def _is_beside(self, side: Side, name: str, x: Any) -> bool:
        """Return whether a value is of images: the model takes it, or it has another shape."""
        if name == "mm_encoder_outputs":  # what `generate` makes of images before the prefill
            return bool(x)
        of_tokens = isinstance(x, Tensor) and tuple(x.shape[:2]) == side.shape
        return (
            isinstance(x, Tensor) and name not in _TEXT and (name in self._takes or not of_tokens)
        )

    def _with_decoder_tokens(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the batch with the decoder's tokens, which are labels moved by one."""
        if batch.get("decoder_input_ids") is not None:
            return batch
        model: Any = self._model
        own = getattr(sys.modules[type(model).__module__], "shift_tokens_right", None)
        labels = batch.get("labels")
        made = _like(batch)
        made.update(batch)
        if labels is not None and hasattr(model, "prepare_decoder_input_ids_from_labels"):
            moved = model.prepare_decoder_input_ids_from_labels(labels=labels)
        elif labels is not None and own is not None:
            config = model.config
            moved = own(labels, config.pad_token_id, config.decoder_start_token_id)
        else:
            raise ValueError("batch must have decoder_input_ids, or labels to make them of")
        made["decoder_input_ids"] = moved
        return made

    def _documents(self, batch: Mapping[str, Any], prefix: str) -> tuple[Tensor, Documents]:
        """Return the tokens whose key begins with `prefix`, and their documents."""
        names = f"{prefix}input_ids", f"{prefix}inputs_embeds"
        given = [batch[name] for name in names if batch.get(name) is not None]
        if len(given) != 1 or not isinstance(given[0], Tensor) or given[0].dim() < 2:
            raise ValueError(f"batch must have either {names[0]} (B, S) or {names[1]} (B, S, D)")
        x = given[0]
        documents = find_documents(batch, x.shape[0], x.shape[1], prefix)
        return x, documents.by_rows() if self._with_encoder else documents

    def _side(self, batch: Mapping[str, Any], prefix: str, layout: Layout | None) -> Side:
        """Return what this rank holds of the tokens whose keys begin with `prefix`."""
        x, documents = self._documents(batch, prefix)
        if layout is None:
            make = getattr(Layout, self._kind)
            layout = make(documents.cu_seqlens, self._comm.size, equal=True)
        else:
            _check_layout(layout, documents, self._comm.size)
        ids = None if prefix else batch.get("position_ids")
        if ids is None:
            whole = {
                name: batch[f"{prefix}{name}"]
                for name in _OF_POSITIONS
                if f"{prefix}{name}" in batch
            }
            ids = default_positions(self._model, whole, documents.rows, documents.columns)
        elif ids.dim() == 1:
            ids = ids[None]
        return side_of(documents, layout, self._comm.rank, ids, x.device)

    def _cut(self, batch: Mapping[str, Any], sharding: Sharding, sides: dict[str, Side]) -> Any:
        """Return the batch with its tensors cut, each as one of the sides."""
        made = _like(batch)
        for name, x in batch.items():
            whole = sharding.whole and (name in self._takes or name in _WHOLE)
            if name in _MADE and not (whole and name in _WHOLE):
                continue
            if whole and name == "attention_mask" and not sharding.main.documents.padded:
                continue
            prefix = "decoder_" if "decoder_" in sides and name.startswith("decoder_") else ""
            side = sides[prefix]
            if not whole and isinstance(x, Tensor) and tuple(x.shape[:2]) == side.shape:
                x = side.take(x, None if name.removeprefix(prefix) in _INPUTS else 0)
            made[name] = x
        documents = sharding.main.documents
        labels = self._labels(batch, documents)
        count = None
        if labels is not None:
            made["labels"] = sharding.main.take(labels, -100)
            count = _counted(labels, documents)
        if sharding.encoder is None and not sharding.whole:
            made["position_ids"] = sharding.main.position_ids
        made[KEY] = replace(sharding, labels=count)
        return made

    def _labels(self, batch: Mapping[str, Any], documents: Documents) -> Tensor | None:
        """Return (B, S): the label of each token, of the next one's number if the model shifts."""
        labels, shifted = batch.get("labels"), batch.get("shift_labels")
        expected = documents.rows, documents.columns
        for name, x in (("labels", labels), ("shift_labels", shifted)):
            if x is not None and tuple(x.shape) != expected:
                found = tuple(x.shape)
                raise ValueError(f"{name} must be {expected}, a label for each token, got {found}")
            if x is not None and self._shifts is None:
                raise ValueError(f"{name} must be None: {type(self._model).__name__} has no loss")
        if shifted is not None or labels is None:
            return shifted
        if not self._shifts:
            return labels
        kept = torch.from_numpy(documents.kept).to(labels.device)
        flat = labels.flatten()
        next_ones = shift_labels(flat[kept], documents.cu_seqlens)
        return torch.full_like(flat, -100).index_copy(0, kept, next_ones).view_as(labels)


_REFUSED = {
    "attention_mask": "shard makes documents of it",
    "decoder_attention_mask": "shard makes documents of it",
    "past_key_values": "only those of sp.cache() have sharded keys",
    "use_cache": "give past_key_values=sp.cache() to keep keys",
    "output_attentions": "no rank has all weights",
}  # in a call
_INPUTS = ("input_ids", "inputs_embeds", "token_type_ids")  # of which padding has a token's
_OF_POSITIONS = ("input_ids", "inputs_embeds", "attention_mask")


def _counted(labels: Tensor, documents: Documents) -> int:
    """Return how many labels of tokens that are no padding count."""
    kept = torch.from_numpy(documents.kept).to(labels.device)
    return int((labels.flatten()[kept] != -100).sum())


def _like(batch: Mapping[str, Any]) -> Any:
    """Return an empty mapping of the batch's type."""
    made: Any = copy.copy(batch)
    made.clear()
    return made


def _check_layout(layout: Layout, documents: Documents, ranks: int) -> None:
    """Raise a ValueError if a user's layout is for other documents, or other ranks."""
    if layout.ranks != ranks:
        raise ValueError(f"layout must be for {ranks} ranks, got one for {layout.ranks}")
    padding = sum(int(layout.padding(rank).sum()) for rank in range(ranks))
    cu = np.minimum(layout.cu_seqlens, layout.tokens - padding)
    own, given = (np.diff(x)[np.diff(x) > 0].tolist() for x in (documents.cu_seqlens, cu))
    if own != given:
        found = f"documents of {_few(given)} tokens, and the batch has {_few(own)}"
        raise ValueError(f"layout must have the batch's documents, got {found}")
    if min(layout.tokens_per_rank) == 0:
        raise ValueError("layout must give each rank a token, which models need")


def _few(lengths: list[int]) -> str:
    return ", ".join(map(str, lengths[:8])) + (", …" if len(lengths) > 8 else "")


def _layout_of(layout: Any) -> Layout | None:
    """Return the layout that a user gave: one, or a plan's micro-batch, which has one."""
    layout = getattr(layout, "layout", layout)
    if layout is not None and not isinstance(layout, Layout):
        found = type(layout).__name__
        raise ValueError(f"layout must be a seqpar.Layout or a micro-batch of a plan, got {found}")
    return layout

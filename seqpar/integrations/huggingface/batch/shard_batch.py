"""Cut a model's batches into the parts that ranks compute."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from seqpar.attention.rehearsal import Preparation
from seqpar.comm.messages.comm import Comm
from seqpar.core.arguments import CuSeqlens
from seqpar.integrations.huggingface.batch.documents import BatchDocuments, find_documents, shape_of
from seqpar.integrations.huggingface.batch.last_tokens import last_tokens
from seqpar.integrations.huggingface.batch.sharding import (
    KEY,
    Origin,
    Sharding,
    Side,
    TokensOfRank,
    UnreadableMask,
    digest_of,
    note_tokens,
    scalars_of,
    side_of,
)
from seqpar.integrations.huggingface.model.code import global_of
from seqpar.integrations.huggingface.model.layers import (
    POSITIONS,
    TYPES,
    answers_for_rows,
    classes_of,
    configs_of,
    default_positions,
    encoder_of,
    kind_of,
    loss_shifts,
    tables_of,
)
from seqpar.layout.labels import shift_labels
from seqpar.layout.layout import Layout

Batch = Mapping[str, Any]
# Arguments that describe documents. After sharding, the layout describes them.
_DOCUMENTS = (
    "attention_mask", "decoder_attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
    "max_length_k", "seq_idx",
)  # fmt: skip
_WHOLE = ("attention_mask", "position_ids")  # passed to the model if the batch stays whole
_MADE = (*_DOCUMENTS, "labels", "shift_labels", "position_ids")
_TEXT = (*_MADE, "input_ids", "inputs_embeds")


@dataclass(frozen=True)
class ModelPreparation:
    """Makes layouts that include the tables of a model's attention, for one rank.

    `SequenceParallel.preparation` returns one. An instance can be pickled, and called in any
    process.
    """

    kind: str  # the kind of the layouts: zigzag, striped or contiguous
    ranks: int
    calls: tuple[Preparation, ...]  # one for each kind of attention call

    def __call__(self, cu_seqlens: CuSeqlens) -> Layout:
        """Return the layout that `shard` would make for these documents, with the tables of the
        model's attention.
        """
        layout: Layout = getattr(Layout, self.kind)(cu_seqlens, self.ranks, equal=True)
        for prepare in self.calls:
            prepare(layout)
        return layout


class BatchSharder:
    """Cuts the batches of one model to the tokens of this rank."""

    def __init__(self, model: Any, comm: Comm, kind: str, with_images: bool) -> None:
        self._model, self._comm = model, comm
        self._make_layout = ModelPreparation(kind, comm.size, ())
        self._with_encoder, self._with_images = encoder_of(model) is not None, with_images
        self.shifts, self.for_rows = loss_shifts(model), answers_for_rows(model)
        self._origin = Origin(comm, type(model).__module__, self.shifts)
        self._takes = set(inspect.signature(type(model).forward).parameters)
        kinds: set[Any] = {type(x) for x in model.modules()}
        self._recurrent = any(kind_of(x) for x in kinds)
        self._chunk = getattr(model.config.get_text_config(), "attention_chunk_size", None)

    def shared(self, batch: Any) -> dict[str, Any]:
        if not isinstance(batch, Mapping):
            return {}
        described: dict[str, Any] = {
            name: digest_of(x)
            for name, x in batch.items()
            if isinstance(x, Tensor) and (name in _MADE or not x.is_floating_point())
        }
        described |= scalars_of(batch)
        of_keys = {f"batch[{name!r}]": x for name, x in described.items()}
        return {"keys of batch": sorted(map(str, batch)), **of_keys}

    def shard(self, batch: Batch, layout: Any = None, cached: bool = False) -> Any:
        """Shard a batch, as `SequenceParallel.shard` does. `cached` is True for a call with a
        cache.
        """
        if not isinstance(batch, Mapping):
            raise ValueError(f"batch must be a mapping, got {type(batch).__name__}")
        _check_tensors(batch)
        if KEY in batch:
            raise ValueError("batch must be whole, got one that shard returned")
        if layout is None and isinstance(batch.get("layout"), Layout):
            layout = batch["layout"]  # from Collator(prepare=…)
        layout = getattr(layout, "layout", layout)
        if layout is not None and not isinstance(layout, Layout):
            expected, found = "a seqpar.Layout or a micro-batch of a plan", type(layout).__name__
            raise ValueError(f"layout must be {expected}, got {found}")
        if not self._with_encoder:
            main = self._side(batch, "", layout, cached)
            # A model of images and text receives the whole batch if the batch contains more than
            # text.
            images = self._with_images and any(self._is_beside(main, *x) for x in batch.items())
            return self._cut(batch, Sharding(main, whole=images), {"": main})
        if layout is not None:
            raise ValueError(
                "layout must be None for a model with an encoder, which has two layouts"
            )
        batch = self._with_decoder_tokens(batch)
        encoder, main = self._side(batch, "", None), self._side(batch, "decoder_", None)
        return self._cut(batch, Sharding(main, encoder), {"": encoder, "decoder_": main})

    def preparation(self, calls: tuple[Preparation, ...]) -> ModelPreparation:
        if self._with_encoder:
            raise ValueError("model must have no encoder, which would need a second layout")
        return replace(self._make_layout, calls=calls)

    def check_tables(self, batch: Batch, sharding: Sharding) -> None:
        """Raise an error if the batch has indices outside the model's embedding tables."""
        classes = classes_of(self._model)
        for name in ("labels", "shift_labels"):
            x = batch.get(name)
            if isinstance(x, Tensor) and classes is not None:
                counted = x.masked_fill(x == -100, 0)
                _check_range(name, counted, classes, "the model's classes", "-100 or ")
        tokens = self._model.get_input_embeddings()
        if self._with_images or not isinstance(tokens, nn.Embedding):
            return
        for name in ("input_ids", "decoder_input_ids"):
            x = batch.get(name)
            if isinstance(x, Tensor):
                if x.dtype not in (torch.int64, torch.int32):
                    raise ValueError(f"{name} must be int64 or int32, got {x.dtype}")
                _check_range(name, x, tokens.num_embeddings, "the model's vocabulary")
        types = batch.get("token_type_ids")
        if isinstance(types, Tensor) and types.dim() == 2 and "token_type_ids" in self._takes:
            for x in tables_of(self._model, TYPES) or [
                tokens
            ]:  # GPT-2 looks up token types in its table of tokens
                _check_range("token_type_ids", types, x.num_embeddings, "the model's token types")
        encoder = encoder_of(self._model)
        inside = set() if encoder is None else set(encoder.modules())
        for x in tables_of(self._model, POSITIONS):
            side = sharding.encoder if x in inside else sharding.main
            size = x.num_embeddings - getattr(x, "offset", 0)
            if side is not None and side.last_position >= size:
                what = f"from 0 to {size - 1}, the model's table of positions"
                raise ValueError(f"position_ids must be {what}, got {side.last_position}")

    def count(self, batch: Batch) -> int | None:
        _check_tensors(batch)
        if self._with_encoder:
            batch = self._with_decoder_tokens(batch)
        _, documents = self._documents(batch, "decoder_" if self._with_encoder else "")
        if self.for_rows:
            return None if batch.get("labels") is None else documents.rows
        labels = self._labels(batch, documents)
        return None if labels is None else _counted(labels, documents)

    def check(self, kwargs: Mapping[str, Any], sharding: Sharding) -> None:
        for name, reason in _REFUSED.items():
            if kwargs.get(name) is None:
                continue
            if sharding.whole and name == "attention_mask":
                sharding.main.documents.check_mask(kwargs[name])
            elif kwargs[name] is not False:
                raise ValueError(f"{name} must not be given: {reason}")
        if any(getattr(x, "output_attentions", False) for x in configs_of(self._model)):
            reason = _REFUSED["output_attentions"]
            raise ValueError(f"output_attentions must be False in the model's config: {reason}")
        if kwargs.get("return_dict") is False:
            raise ValueError(
                "return_dict must be True, because outputs are found by name, got False"
            )
        self._check_origin(sharding, "labels" in kwargs)
        main, inputs = sharding.main, sharding.encoder or sharding.main
        expected = dict.fromkeys(("labels", "decoder_input_ids"), (1, main.tokens))
        if self.for_rows:
            del expected["labels"]
        expected["input_ids"] = main.shape if sharding.whole else (1, inputs.tokens)
        for name, shape in expected.items():
            x = kwargs.get(name)
            if x is not None and tuple(x.shape[:2]) != shape:
                reason = "all tensors must go through shard"
                raise ValueError(f"{name} must be {shape}, got {tuple(x.shape)}: {reason}")
        if kwargs.get("labels") is not None and sharding.labels is None:
            raise ValueError("labels must go through shard, which shifts them before it cuts them")
        by_shard = sharding.encoder is None and not sharding.whole
        ids, own = kwargs.get("position_ids"), main.position_ids
        if by_shard and (ids is None or (own is not None and ids.shape != own.shape)):
            found = "none" if ids is None else str(tuple(ids.shape))
            raise ValueError(f"position_ids must be those that shard returned, got {found}")

    def _check_origin(self, sharding: Sharding, with_labels: bool) -> None:
        own, other = self._origin, sharding.origin
        if other is None or other == own:
            return
        reasons = {
            "a different group of ranks": other.comm is not own.comm,
            f"a model of {other.family}": other.family != own.family,
            "a model with a different kind of labels": with_labels and other.shifts != own.shifts,
        }
        for reason, differs in reasons.items():
            if differs:
                way_out = "shard it with the sp that seqpar's enable returned for this model"
                raise ValueError(f"the batch must not be sharded for {reason}: {way_out}")

    def _is_beside(self, side: Side, name: str, x: Any) -> bool:
        """Return whether a value of the batch describes images. Such a value is passed to the model
        unchanged.
        """
        if name == "mm_encoder_outputs":  # image features that `generate` computes first
            return bool(x)
        if not isinstance(x, Tensor) or name in _TEXT:
            return False
        return name in self._takes or tuple(x.shape[:2]) != side.shape

    def _with_decoder_tokens(self, batch: Batch) -> Batch:
        """Return the batch with decoder tokens, which are the labels moved by one."""
        if batch.get("decoder_input_ids") is not None:
            return batch
        model, config, labels = self._model, self._model.config, batch.get("labels")
        own = global_of(model, "shift_tokens_right")
        made: Any = copy.copy(batch)
        if labels is not None and hasattr(model, "prepare_decoder_input_ids_from_labels"):
            moved = model.prepare_decoder_input_ids_from_labels(labels=labels)
        elif labels is not None and own is not None:
            moved = own(labels, config.pad_token_id, config.decoder_start_token_id)
        else:
            raise ValueError("batch must have decoder_input_ids, or labels to make them from")
        made["decoder_input_ids"] = moved
        return made

    def _documents(
        self, batch: Batch, prefix: str, cached: bool = False
    ) -> tuple[Tensor, BatchDocuments]:
        names = f"{prefix}input_ids", f"{prefix}inputs_embeds"
        x, *others = [batch[name] for name in names if batch.get(name) is not None] or [None]
        if others or not isinstance(x, Tensor) or x.dim() < 2:
            raise ValueError(f"batch must have either {names[0]} (B, S) or {names[1]} (B, S, D)")
        cuts = False if cached else self._cuts(batch)
        documents = find_documents(batch, x.shape[0], x.shape[1], prefix, cuts)
        return x, documents.by_rows() if self._with_encoder else documents

    def _cuts(self, batch: Batch) -> bool | str:
        """Return whether each jump in the positions of a batch begins a document. If this is
        unknown, return a text with the reason.
        """
        # This follows transformers. If the batch has an attention mask, positions begin no
        # documents. Without a mask, most models begin a document at each jump of the positions,
        # unless they use a cache, which is their default. `check_packing` refuses a call in which
        # the model makes a different mask.
        if batch.get("attention_mask") is not None:
            return False
        if self._recurrent:
            reason = "the model's recurrent layers begin no document at a jump"
            return f"{reason}; give an attention_mask"
        cache = batch.get("use_cache")
        if cache is None:
            cache = getattr(self._model.config.get_text_config(), "use_cache", False)
        if not cache:
            return True
        hint = "give an attention_mask to keep them as positions"
        return f"{hint}, or use_cache=False to begin a document at each jump"

    def _side(self, batch: Batch, prefix: str, layout: Layout | None, cached: bool = False) -> Side:
        x, documents = self._documents(batch, prefix, cached)
        if layout is None:
            layout = self._make_layout(documents.cu_seqlens)
        else:
            _check_layout(layout, documents, self._comm.size)
        ids = None if prefix else batch.get("position_ids")
        if ids is None:
            ids = self._default_positions(batch, prefix, documents)
        else:
            ids = ids[None] if ids.dim() == 1 else ids
            self._check_positions(batch, ids, documents)
        side_of_rank = partial(side_of, documents, layout, position_ids=ids, device=x.device)
        if documents.packed and not any(
            side_of_rank(rank=rank).shows_jumps() for rank in range(layout.ranks)
        ):
            reason = (
                "only where one rank's tokens end, so that no rank's mask shows what jumps mean"
            )
            how = "begin documents at position 0, or give an attention_mask to keep the positions"
            raise ValueError(f"position_ids jump {reason}: {how}")
        return side_of_rank(rank=self._comm.rank)

    def _default_positions(self, batch: Batch, prefix: str, documents: BatchDocuments) -> Tensor:
        found = {name: batch.get(f"{prefix}{name}") for name in _OF_POSITIONS}
        whole = {name: x for name, x in found.items() if x is not None}
        return default_positions(self._model, whole, documents.rows, documents.columns)

    def _check_positions(self, batch: Batch, ids: Tensor, documents: BatchDocuments) -> None:
        if ids.dim() != 2:
            return
        positions = ids.detach().cpu().numpy()
        positions = np.broadcast_to(positions, (documents.rows, documents.columns)).ravel()
        positions = positions[documents.kept]
        if self._chunk and batch.get("attention_mask") is None:
            first = positions[documents.cu_seqlens[:-1]]
            if documents.cu_seqlens.size > documents.rows + 1 and (first % self._chunk).any():
                reason = (
                    f"because the model's layers cut chunks of {self._chunk} tokens by position"
                )
                found = int(first[np.argmax(first % self._chunk != 0)])
                wanted = f"must begin documents at multiples of {self._chunk}"
                raise ValueError(f"position_ids {wanted}, {reason}, got {found}")
        if "position_ids" in self._takes and not self._with_encoder:
            return
        starts = np.repeat(documents.cu_seqlens[:-1], np.diff(documents.cu_seqlens))
        counted = np.arange(documents.kept.size) - starts
        own = self._default_positions(batch, "", documents).cpu().numpy().ravel()[documents.kept]
        if not np.array_equal(positions, counted) and not np.array_equal(positions, own):
            name = type(self._model).__name__
            raise ValueError(f"position_ids must be None: {name} counts positions by itself")

    def _cut(self, batch: Batch, sharding: Sharding, sides: dict[str, Side]) -> Any:
        made: Any = copy.copy(batch)
        made.clear()
        inputs: list[tuple[Side, str]] = []
        for name, x in batch.items():
            if isinstance(x, Layout):
                continue
            whole = sharding.whole and (name in self._takes or name in _WHOLE)
            if name in _MADE and not (whole and name in _WHOLE):
                continue
            if whole and name == "attention_mask" and not self._needs_mask(batch, sharding.main):
                continue
            prefix = "decoder_" if "decoder_" in sides and name.startswith("decoder_") else ""
            side, is_input = sides[prefix], name.removeprefix(prefix) in _INPUTS
            if not whole and is_input:
                inputs.append((side, name))
            if not whole and isinstance(x, Tensor) and tuple(x.shape[:2]) == side.shape:
                x = side.take(x, None if is_input else 0)
            elif not whole and name in self._takes:
                _check_not_by_row(name, x, side)
            made[name] = x
        documents = sharding.main.documents
        labels = None if self.for_rows else self._labels(batch, documents)
        count = None
        if self.for_rows:
            sharding.last_tokens = last_tokens(self._model, batch, documents)
            if (x := _labels_of_rows(batch, documents.rows)) is not None:
                made["labels"], count = x, documents.rows
        if labels is not None:
            made["labels"] = sharding.main.take(labels, -100)
            count = _counted(labels, documents)
        if sharding.encoder is None and not sharding.whole:
            ids = sharding.main.position_ids
            assert ids is not None
            # A view, so that `side` and `ids` do not refer to each other.
            made["position_ids"] = ids.view_as(ids)
        if self._comm.size > 1:
            _guard(made, [name for _, name in inputs])
        for side, name in [(sharding.main, "labels"), (sharding.main, "position_ids"), *inputs]:
            if isinstance(x := made.get(name), Tensor):
                note_tokens(x, side)
        sharding.labels, sharding.origin = count, self._origin
        made[KEY] = sharding
        return made

    def _needs_mask(self, batch: Batch, side: Side) -> bool:
        documents = side.documents
        if documents.kept.size < documents.rows * documents.columns:  # the batch has padding
            return True
        cut = find_documents(batch, *side.shape, "", True).cu_seqlens
        return not np.array_equal(cut, documents.cu_seqlens)

    def _labels(self, batch: Batch, documents: BatchDocuments) -> Tensor | None:
        """Return each token's label (B, S). If the model shifts labels, it is the label of the next
        token.
        """
        labels, shifted = batch.get("labels"), batch.get("shift_labels")
        expected = documents.rows, documents.columns
        for name, x in (("labels", labels), ("shift_labels", shifted)):
            got = shape_of(x)
            if x is not None and got != expected:
                raise ValueError(f"{name} must be {expected}, a label for each token, got {got}")
            if x is not None and self.shifts is None:
                what = f"{type(self._model).__name__} computes no loss by its loss_function"
                how = "enable a model whose head computes one, or pass your own loss to sp.total"
                raise ValueError(f"{name} must be None: {what}; {how}")
        if shifted is not None or labels is None:
            return shifted
        if not self.shifts:
            return labels
        kept = torch.from_numpy(documents.kept).to(labels.device)
        flat = labels.flatten()
        next_ones = shift_labels(flat[kept], documents.samples)
        return torch.full_like(flat, -100).index_copy(0, kept, next_ones).view_as(labels)


_REFUSED = {
    "attention_mask": "shard makes documents of it",
    "decoder_attention_mask": "shard makes documents of it",
    "past_key_values": "only those of sp.cache() have sharded keys",
    "use_cache": "give past_key_values=sp.cache() to keep keys",
    "output_attentions": "no rank has all attention weights",
    "encoder_hidden_states": "shard does not cut the states of a different model",
    "cross_attention_states": "shard does not cut the states of a different model",
}  # arguments of a call
# The layout's padding gets copies of a token.
_INPUTS = ("input_ids", "inputs_embeds", "token_type_ids")
_OF_POSITIONS = ("input_ids", "inputs_embeds", "attention_mask")


def _guard(part: Any, names: list[str]) -> None:
    """Change the part of a batch so that a model raises an error if it receives the part and is not
    enabled.
    """
    for name in [name for name in names if part[name] is not None]:
        if name.endswith("input_ids"):
            part[name] = part[name].as_subclass(TokensOfRank)
        elif name == "inputs_embeds":
            part["attention_mask"] = UnreadableMask()


def _check_tensors(batch: Batch) -> None:
    for name in (*_TEXT, "token_type_ids"):
        if isinstance(batch.get(name), list | tuple):
            found = type(batch[name]).__name__
            how = 'call the tokenizer with return_tensors="pt"'
            raise ValueError(f"{name} must be a tensor, got a {found}: {how}")


def _check_range(name: str, x: Tensor, size: int, what: str, others: str = "") -> None:
    if x.numel() and not x.is_floating_point():
        low, high = (int(bound) for bound in x.aminmax())
        if low < 0 or high >= size:
            expected = f"{others}from 0 to {size - 1}, {what}"
            raise ValueError(f"{name} must be {expected}, got {low} to {high}")


def check_all_logits(kwargs: Mapping[str, Any]) -> None:
    kept = kwargs.get("logits_to_keep")
    if kept is not None and (isinstance(kept, Tensor) or kept != 0):
        what = f"a tensor {tuple(kept.shape)}" if isinstance(kept, Tensor) else repr(kept)
        reason = "each rank would keep its own tokens; take them from sp.unshard(outputs)"
        found = f"{what}: {reason}"
        raise ValueError(f"logits_to_keep must not be given with a sharded batch, got {found}")


def _check_not_by_row(name: str, x: Any, side: Side) -> None:
    rows = side.documents.rows
    if rows > 1 and isinstance(x, Tensor) and x.shape[:1] == (rows,):
        reason = "tokens of all rows become one row; give batches of one row"
        raise ValueError(
            f"{name} must not have a value for each row, got {tuple(x.shape)}: {reason}"
        )


def _labels_of_rows(batch: Batch, rows: int) -> Tensor | None:
    labels = batch.get("labels")
    if batch.get("shift_labels") is not None:
        raise ValueError("shift_labels must be None: the model's head has one label for each row")
    if labels is None or (isinstance(labels, Tensor) and labels.shape[:1] == (rows,)):
        return labels
    expected = f"({rows},) or ({rows}, labels), a label for each row"
    raise ValueError(f"labels must be {expected}, got {shape_of(labels)}")


def _counted(labels: Tensor, documents: BatchDocuments) -> int:
    kept = torch.from_numpy(documents.kept).to(labels.device)
    return int((labels.flatten()[kept] != -100).sum())


def _check_layout(layout: Layout, documents: BatchDocuments, ranks: int) -> None:
    if layout.ranks != ranks:
        raise ValueError(f"layout must be for {ranks} ranks, got one for {layout.ranks}")
    cu = np.minimum(layout.cu_seqlens, layout.tokens - layout._padding)
    own, given = (np.diff(x)[np.diff(x) > 0].tolist() for x in (documents.cu_seqlens, cu))
    if own != given:
        found = f"documents of {_few(given)} tokens, and the batch has {_few(own)}"
        raise ValueError(f"layout must have the batch's documents, got {found}")
    if min(layout.tokens_per_rank) == 0:
        raise ValueError(
            "layout must give each rank at least one token, got "
            f"{_few([*layout.tokens_per_rank])} per rank"
        )


def _few(lengths: list[int]) -> str:
    return ", ".join(map(str, lengths[:8])) + (", …" if len(lengths) > 8 else "")

"""Attention over ranks in NeMo Automodel, as a model's own `ContextParallelSharder`.

Automodel calls a model's method `prepare_model_inputs_for_cp` to get the model's sharder. `enable`
adds this method to a transformers model. This module imports Automodel, and is tested with
nemo-automodel 0.7.0.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NoReturn

import numpy as np
import torch
from nemo_automodel.components.distributed.context_parallel.sharder import (
    ContextParallelSharder,
    ShardLayout,
)
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from seqpar.core.arguments import Ints, parse_cu_seqlens
from seqpar.integrations.automodel_private import DOCUMENT_NUMBERS, OWNS_ATTENTION
from seqpar.integrations.huggingface.batch.documents import CU_SEQLENS
from seqpar.integrations.huggingface.model.replaced import Replaced
from seqpar.integrations.huggingface.session import SequenceParallel
from seqpar.integrations.packed_model import LayoutMaker, PackedModel, PackedPart

__all__ = ["enable", "recipe"]

_HOOK = "prepare_model_inputs_for_cp"
_IGNORED = -100  # the label of tokens without a loss
_NO_DOCUMENT = -1000  # fills rows of `seq_lens` to the same number of documents
# The value of each per-token key for the layout's padding; 0 for keys that are not listed.
_OF_PADDING = {"labels": _IGNORED, "padding_mask": True}
# Keys that describe documents. After sharding, the layout describes them.
_DOCUMENTS = (
    "attention_mask", "seq_lens", "seq_lens_padded", "qkv_format", "cu_seqlens", "max_seqlen",
    "packed_token_indices", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
    "seq_idx",
)  # fmt: skip


def enable(
    model: nn.Module,
    device_mesh: Any,
    strategy: str = "ring",
    *,
    layout: LayoutMaker = "zigzag",
    **options: Any,
) -> SequenceParallel:
    """Give a transformers model a `ContextParallelSharder` for a strategy of seqpar.

    Automodel then calls the model with this rank's tokens of the packed documents, and attention
    covers the keys of all ranks. Automodel still computes the loss and wraps the model in FSDP. All
    ranks of the mesh's dimension "cp" must call `enable`, with equal weights.

    Args:
        model: a `PreTrainedModel`, before or after Automodel wraps it in FSDP2. Its class may be
            Automodel's own.
        device_mesh: Automodel's mesh. Its dimension "cp" is the group of the strategy.
        strategy: as in `seqpar.make_attention`.
        layout: the kind of the layouts, "zigzag", "striped" or "contiguous", with equal numbers of
            tokens on all ranks; or a function that takes the (documents + 1,) offsets of a batch's
            documents and returns the layout of the batch.
        options: the strategy's options, and `check_ranks`.

    Returns:
        sp: the same kind of session as `huggingface.enable` returns, with `sp.report()` and
            `sp.disable()`. Do not call `sp.shard`: Automodel shards the batches.

    Raises:
        ValueError: if the mesh has no dimension "cp" of at least two ranks, or has several ranks in
            "pp" or "tp"; if the model has its own sharder; if the model's forward does not take
            `**kwargs`; or if a layer cannot be computed exactly on a part of the tokens.
    """
    _check_mesh(device_mesh)
    if hasattr(model, _HOOK):
        name = type(model).__name__
        raise ValueError(
            f"model must not have its own {_HOOK}, which {name} has: do not enable the model"
        )
    parameters = inspect.signature(type(model).forward).parameters
    if all(x.kind is not x.VAR_KEYWORD for x in parameters.values()):
        name = type(model).__name__
        raise ValueError(f"model must take **kwargs, without which {name} gets no sharded batch")
    packed = PackedModel(model, device_mesh["cp"], strategy, layout, options)
    masks = _KeptMasks(model)
    masks.register()
    sharder = _BatchSharder(packed, masks, set(parameters))
    packed.sp.undo_on_disable(
        Replaced(model, _HOOK, sharder.prepare), Replaced(model, OWNS_ATTENTION, True), masks
    )
    return packed.sp


def recipe(
    base: type,
    strategy: str = "ring",
    *,
    layout: LayoutMaker = "zigzag",
    **options: Any,
) -> type:
    """Return a subclass of an Automodel recipe that calls `enable` as soon as the model is built.

    Args:
        base: a recipe, such as `TrainFinetuneRecipeForNextTokenPrediction`. If the dimension "cp"
            of the recipe's mesh has one rank, the subclass behaves as `base`.
        strategy, layout, options: as in `enable`.
    """

    class SequenceParallelRecipe(base):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "model_parts" and _ranks(self.device_mesh, "cp") > 1:
                if len(value) != 1:
                    raise ValueError(f"model_parts must be one model, got {len(value)} stages")
                _check_loss(self.loss_fn)
                enable(value[0], self.device_mesh, strategy, layout=layout, **options)
            super().__setattr__(name, value)

    SequenceParallelRecipe.__name__ = SequenceParallelRecipe.__qualname__ = base.__name__
    return SequenceParallelRecipe


def _ranks(device_mesh: Any, name: str) -> int:
    names = getattr(device_mesh, "mesh_dim_names", None) or ()
    return int(device_mesh[name].size()) if name in names else 1


def _check_mesh(device_mesh: Any) -> None:
    if _ranks(device_mesh, "cp") < 2:
        names = getattr(device_mesh, "mesh_dim_names", None)
        found = f"dimensions {names}" if names else type(device_mesh).__name__
        way_out = "set distributed.cp_size, or leave the model as it is"
        raise ValueError(
            f'device_mesh must have a dimension "cp" of at least 2 ranks, got {found}: {way_out}'
        )
    for name, what in (("pp", "pipeline stages"), ("tp", "tensor parallelism")):
        if (ranks := _ranks(device_mesh, name)) > 1:
            reason = f"{what} are not supported beside seqpar's attention in Automodel"
            raise ValueError(f'device_mesh must have 1 rank in "{name}", got {ranks}: {reason}')


def _check_loss(loss: Any) -> None:
    from nemo_automodel.components.loss.linear_ce import LinearCrossEntropy

    if isinstance(loss, LinearCrossEntropy):
        reason = "Automodel then keeps the logits of one token, a different one on each rank"
        how = "use MaskedCrossEntropy"
        raise ValueError(
            f"loss_fn must be a loss of logits, got {type(loss).__name__}: {reason}; {how}"
        )


class _KeptMasks:
    """Hooks that keep the masks that Automodel's hooks remove from calls of attention layers.

    Automodel's hooks replace the mask of each layer by `is_causal`, and would turn windows into
    full attention. A hook of this class therefore keeps the mask before Automodel's hooks run, and
    a second hook restores the mask after they have run.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []

    def register(self) -> None:
        self.remove()
        for name, module in self._model.named_modules():
            if name.endswith("self_attn"):
                self._register_on(module)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _register_on(self, layer: nn.Module) -> None:
        kept: list[dict[str, Any]] = []

        def keep(module: Any, args: Any, kwargs: Any) -> None:
            kept[:] = [{x: kwargs[x] for x in ("attention_mask", "is_causal") if x in kwargs}]

        def restore(module: Any, args: Any, kwargs: Any) -> Any:
            others = {x: y for x, y in kwargs.items() if x not in ("attention_mask", "is_causal")}
            return args, others | kept.pop()

        self._handles += [
            layer.register_forward_pre_hook(keep, with_kwargs=True, prepend=True),
            layer.register_forward_pre_hook(restore, with_kwargs=True),
        ]


class _BatchSharder:
    def __init__(self, packed: PackedModel, masks: _KeptMasks, taken: set[str]) -> None:
        self._packed, self._masks, self._taken = packed, masks, taken

    def prepare(self, batch: dict[str, Any], *, num_chunks: int = 1) -> dict[str, Any]:
        if num_chunks != 1:
            reason = "a pipeline's chunks would need a layout each"
            raise ValueError(f"num_chunks must be 1, got {num_chunks}: {reason}")
        self._masks.register()
        return {
            "cp_sharder": ContextParallelSharder(
                shard_batch=self.shard_batch, local_token_global_indices=_refuse_indices
            )
        }

    def shard_batch(
        self,
        cp_mesh: Any,
        tp_mesh: Any,
        batch: dict[str, Any],
        *,
        loss_mask: Tensor | None = None,
        padding_token_id: int = 0,
    ) -> tuple[Any, dict[str, Any], ShardLayout]:
        """Return three values: a context in which the model runs, this rank's part of a batch (B,
        S), and the layout of the batch.
        """
        with self._packed.sp.faults():
            source, tokens, cu_seqlens = self._tokens(batch, loss_mask)
        rows, columns = tokens["position_ids"].shape
        flat = {name: x.reshape(1, -1, *x.shape[2:]) for name, x in tokens.items()}
        inputs = {x: flat[x] for x in (source, "position_ids")}
        part = self._packed.shard(inputs, cu_seqlens)
        made = dict(part.inputs)
        for name in sorted(flat.keys() - inputs.keys()):
            # A model that does not know a key passes the key on to attention, which refuses it.
            if name in self._taken or name in ("labels", "loss_mask"):
                made[name] = part.cut(flat[name], _OF_PADDING.get(name, 0))
        return nullcontext, made, _shard_layout(part, (rows, columns), flat[source].device)

    def _tokens(
        self, batch: dict[str, Any], loss_mask: Tensor | None
    ) -> tuple[str, dict[str, Tensor], Ints]:
        found = [x for x in ("input_ids", "inputs_embeds") if batch.get(x) is not None]
        if len(found) != 1 or batch[found[0]].dim() < 2:
            raise ValueError("batch must have either input_ids (B, S) or inputs_embeds (B, S, D)")
        shape = rows, columns = tuple(batch[found[0]].shape[:2])
        if loss_mask is not None:
            name = "loss_mask" if batch.get("labels") is not None else "labels"
            batch = {**batch, name: loss_mask}
        numbers = document_numbers(batch, shape)
        cu_seqlens = _offsets(numbers)
        tokens = {x: y for x, y in batch.items() if isinstance(y, Tensor) and x not in _DOCUMENTS}
        tokens["position_ids"] = _positions(batch, numbers, cu_seqlens)
        for name, x in tokens.items():
            if tuple(x.shape[:2]) != shape:
                expected = f"({rows}, {columns}, …), with a value for each token"
                raise ValueError(f"{name} must be {expected}, got {tuple(x.shape)}")
        return found[0], tokens, cu_seqlens


def document_numbers(batch: Mapping[str, Any], shape: tuple[int, int]) -> Ints:
    """Return (B, S): for each token, the number of its document within the row, counted from 1. The
    number of padding is 0.
    """
    mask, lengths = batch.get("attention_mask"), batch.get("seq_lens")
    for name in (DOCUMENT_NUMBERS, "attention_mask"):
        x = batch.get(name)
        if x is not None and x.dim() == 2:
            return _checked_numbers(name, _host(x).astype(np.int64), shape)
    if mask is not None:
        return _numbers_of_mask(mask, shape)
    if lengths is not None:
        return _numbers_of_lengths(_host(lengths), _host(batch["seq_lens_padded"]), shape)
    offsets = [parse_cu_seqlens(batch[x], x) for x in CU_SEQLENS if batch.get(x) is not None]
    if offsets:
        cu_seqlens = offsets[0]
        if cu_seqlens[-1] != shape[0] * shape[1]:
            expected = f"the {shape[0] * shape[1]} tokens of the batch"
            raise ValueError(f"cu_seq_lens_q must end at {expected}, got {cu_seqlens[-1]}")
        counted = np.repeat(np.arange(1, cu_seqlens.size), np.diff(cu_seqlens))
        return counted.reshape(shape)
    positions = batch.get("position_ids")
    if positions is None or positions.shape[-1:] != shape[-1:] or positions.dim() > 2:
        return np.ones(shape, np.int64)
    restarts = np.broadcast_to(_host(positions), shape) == 0
    restarts[:, 0] = True
    return restarts.cumsum(1)


def _host(x: Tensor) -> Any:
    return x.detach().cpu().numpy()


def _checked_numbers(name: str, numbers: Ints, shape: tuple[int, int]) -> Ints:
    if numbers.shape != shape:
        raise ValueError(f"{name} must be {shape}, got {numbers.shape}")
    runs = np.ones(shape, bool)
    runs[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    for row, (begins, held) in enumerate(zip(runs, numbers, strict=True)):
        found = held[begins & (held != 0)]
        if np.unique(found).size != found.size:
            expected = "a document number for each token, with each document's tokens adjacent"
            raise ValueError(
                f"{name} must be {expected}, got a document in several ranges of row {row}"
            )
    return numbers


def _numbers_of_mask(mask: Tensor, shape: tuple[int, int]) -> Ints:
    rows, columns = shape
    if tuple(mask.shape) != (rows, 1, columns, columns) or mask.dtype != torch.bool:
        expected = f"({rows}, {columns}), or bool ({rows}, 1, {columns}, {columns})"
        raise ValueError(f"attention_mask must be {expected}, got {mask.dtype} {tuple(mask.shape)}")
    allowed = mask[:, 0]
    real, queries = allowed.any(-1), torch.arange(columns, device=mask.device)
    begins = real & (allowed.int().argmax(-1) == queries)
    numbers = begins.cumsum(1) * real
    same = (numbers[:, :, None] == numbers[:, None]) & real[:, :, None]
    if not torch.equal(allowed, (same & (queries[:, None] >= queries))):
        raise ValueError(
            "attention_mask must be causal within documents, got a mask that is not; "
            "describe documents by position_ids or seq_lens"
        )
    found: Ints = _host(numbers)
    return found


def _numbers_of_lengths(lengths: Ints, padded: Ints, shape: tuple[int, int]) -> Ints:
    rows = []
    for row, padded_row in zip(lengths, padded, strict=True):
        real, whole = row[row != _NO_DOCUMENT], padded_row[padded_row != _NO_DOCUMENT]
        if real.size != whole.size or (real > whole).any() or whole.sum() != shape[1]:
            expected = f"at least seq_lens, with a sum of {shape[1]} in each row"
            found = f"{whole.tolist()} for {real.tolist()}"
            raise ValueError(f"seq_lens_padded must be {expected}, got {found}")
        counts = np.stack([real, whole - real], 1).ravel()
        numbers = np.stack([np.arange(1, real.size + 1), np.zeros(real.size, int)], 1).ravel()
        rows.append(np.repeat(numbers, counts))
    return np.stack(rows)


def _offsets(numbers: Ints) -> Ints:
    """Return the indices, among all B·S tokens, at which a document or consecutive tokens of
    padding begin. The last element is B·S.
    """
    begins = np.ones(numbers.shape, bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return np.r_[np.flatnonzero(begins), numbers.size].astype(np.int64)


def _positions(batch: Mapping[str, Any], numbers: Ints, cu_seqlens: Ints) -> Tensor:
    """Return the positions (B, S) of tokens in their documents. Consecutive tokens of padding are
    numbered like the tokens of a document.
    """
    rows, columns = numbers.shape
    like = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
    given = batch.get("position_ids")
    if given is None:
        given = torch.arange(columns, device=like.device)
    if tuple(given.shape) not in ((columns,), (1, columns), (rows, columns)):
        raise ValueError(f"position_ids must be ({rows}, {columns}), got {tuple(given.shape)}")
    starts = np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
    counted = (np.arange(numbers.size) - starts).reshape(numbers.shape)
    padding = torch.from_numpy(numbers == 0).to(given.device)
    return torch.where(padding, torch.from_numpy(counted).to(given), given)


def _shard_layout(part: PackedPart, shape: tuple[int, int], device: torch.device) -> ShardLayout:
    layout, (rows, columns) = part.layout, shape
    if len(set(layout.tokens_per_rank)) > 1:
        return ShardLayout(padded_seq_len=layout.tokens)  # `_refuse_indices` answers for the rest
    in_rows = rows > 1 and layout.tokens == rows * columns
    return ShardLayout(
        local_token_global_indices=layout.token_indices(part.rank, device),
        original_seq_len=None if in_rows else rows * columns,
        padded_seq_len=layout.tokens,
        input_row_shape=shape if in_rows else None,
    )


def _refuse_indices(cp_mesh: Any, padded_seq_len: int, device: Any) -> NoReturn:
    reason = "Automodel's functions for the sharded batch gather equally many from each rank"
    how = "use layouts with equal=True, or layout.shard and layout.unshard"
    raise ValueError(f"layout must give all ranks the same number of tokens: {reason}; {how}")

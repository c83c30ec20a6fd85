"""The attention function and the mask function that transformers calls under the name "seqpar"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqpar.core.compiling import is_traced
from seqpar.core.torch_private import calling_modules
from seqpar.integrations.huggingface.attention.call import (
    EnabledModel,
    ModelCall,
    PreparedMask,
    ShardedMask,
    current,
)
from seqpar.integrations.huggingface.attention.counting import counted
from seqpar.integrations.huggingface.attention.masks import MaskShape, is_packed, read_mask
from seqpar.integrations.huggingface.batch.sharding import KEY, Side
from seqpar.integrations.huggingface.model.layers import AttentionLayer, faults_of_adapters
from seqpar.layout.layout import Layout
from seqpar.strategies.lasp2 import LASP2Attention

FeatureMap = Callable[[Tensor], Tensor]
QueryKeyValue = tuple[Tensor, Tensor, Tensor]

TEMPERED = "_seqpar_tempered"  # attribute of Llama 4's layers; see `_tempered`
# Arguments that models pass to attention and that do not change its result.
_HARMLESS = {
    "cache_position", "deterministic", "image_grid_thw", "image_sizes", "layer_idx",
    "logits_to_keep", "mm_token_type_ids", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "pixel_values", "pixel_values_videos", "position_embeddings",
    "position_ids", "return_dict", "token_type_ids", "training", "use_cache", "video_grid_thw",
}  # fmt: skip


def session_of(module: nn.Module) -> EnabledModel | None:
    layer = getattr(module, KEY, None)
    if not isinstance(layer, AttentionLayer):
        return None
    session: EnabledModel = layer.session
    # Several layers use the same compiled graph, so a graph must not depend on one layer's entry in
    # a dictionary.
    return session if is_traced() or module in session.layers else None


def enabled_layer(module: nn.Module) -> tuple[EnabledModel, AttentionLayer]:
    session = session_of(module)
    if session is None:
        what = f"a layer {type(module).__name__} must belong to an enabled model"
        way_out = "copy the model before you enable it"
        raise ValueError(f"{what}, got one of a copy, or of a model that is not enabled: {way_out}")
    layer: AttentionLayer = getattr(module, KEY)
    return session, layer


def running_call() -> ModelCall:
    call = current.call
    if call is None:
        if reasons := faults_of_adapters(calling_modules()):
            raise ValueError(reasons[0])
        reason = "call it as model(**sp.shard(batch))"
        raise ValueError(f"the model must be called itself while it is enabled: {reason}")
    return call


def describe_mask(
    *args: Any, mask_function: Any = None, attention_mask: Any = None, **kwargs: Any
) -> ShardedMask:
    """Return the mask for a kind of layer. Raises a ValueError if seqpar cannot express the
    mask.
    """
    if isinstance(attention_mask, PreparedMask):
        _check_prepared(attention_mask, mask_function)
        return attention_mask
    call = running_call()
    with call.session.faults():
        if call.prepared is not None:
            return call.prepared
        offset = kwargs.get("q_offset", 0)
        if call.cache is None and (isinstance(offset, Tensor) or offset != 0):
            raise ValueError(
                "past_key_values must be a cache that sp.cache() returned, because keys are sharded"
            )
        whole = call.sharding.whole and not call.entered
        if attention_mask is not None and not whole and not attention_mask.all():
            raise ValueError(
                "attention_mask must be passed to shard as part of the batch, "
                "because shard finds documents in it"
            )
        if call.cache is None:
            check_packing(call.sharding.main, is_packed(mask_function))
        try:
            documents = call.sharding.main.documents if whole else None
            shape = read_mask(mask_function, documents, call.sharding.main.position_ids)
        except ValueError as reason:
            config = type(kwargs.get("config")).__name__
            raise ValueError(f"a mask of {config} cannot be expressed: {reason}") from None
    return ShardedMask(call, shape)


def check_packing(side: Side, separates: bool) -> None:
    """Raise a ValueError if the layout begins a document where positions jump, but the model's mask
    does not separate documents there.

    `separates` says whether the model's mask separates documents at jumps.
    """
    if side.documents.packed and not separates and side.shows_jumps():
        reason = "which the model's mask does not treat as beginnings of documents"
        how = "pass an attention_mask of ones, so that jumps do not begin documents"
        raise ValueError(f"position_ids have jumps, {reason}: {how}")


def _check_prepared(mask: PreparedMask, function: Any) -> None:
    name = function.__name__  # a compiled graph can read the function's name, but not its closure
    bounded = mask.pattern.left >= 0 or mask.pattern.chunk is not None
    if name != ("and_mask" if bounded else "causal_mask_function"):
        raise ValueError(
            f"the model cannot be compiled: its layers use the mask {name}, which is not the "
            "mask that seqpar has prepared"
        )


class ScoreOptions(NamedTuple):
    dropout: float = 0.0
    scaling: float | None = None
    is_causal: bool | None = None
    sliding_window: int | None = None  # ignored, because the mask contains the window
    softcap: float | None = None
    s_aux: Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        return {"softmax_scale": self.scaling, "softcap": self.softcap, "sinks": self.s_aux}


class LayerCall(NamedTuple):
    """One layer's attention in a call of its model, after all checks."""

    session: EnabledModel
    layer: AttentionLayer
    call: ModelCall
    shape: MaskShape
    scores: ScoreOptions
    cached: int | None  # the layer's index in the cache


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention over the keys of all ranks. The arguments are (1, H, T_local, D),
    and the result is (1, T_local, H, D).

    Raises a ValueError that names the layer and the reason if the call cannot be computed.
    """
    session, layer = enabled_layer(module)
    with session.faults(layer.name):
        known = {name: options.pop(name) for name in ScoreOptions._fields if name in options}
        own = _checked(module, (query, key, value), attention_mask, ScoreOptions(**known), options)
    q = _tempered(module, own.call, query.transpose(1, 2))
    decodes = own.call.decodes
    return counted(layer, q, lambda q: _compute(own, q, key, value), decodes), None


def _tempered(module: Any, call: ModelCall, q: Tensor) -> Tensor:
    """Return Llama 4's queries (1, T_local, Hq, D), scaled by the positions of their tokens.

    The position of a token is its column in the batch. In packed rows, the position is the index of
    the token in its document.
    """
    if not hasattr(module, TEMPERED):
        return q
    side = call.side(False)
    past = 0 if call.cache is None else call.cache.get_seq_length()
    columns = side.index.to(q.device).clamp(min=0) % side.documents.columns + past
    is_packed_row = side.documents.cu_seqlens.size - 1 > side.documents.rows
    if is_packed_row and side.position_ids is not None:
        columns = side.position_ids[0]
    steps = torch.floor((columns.float() + 1.0) / module.floor_scale)
    return (q * (torch.log1p(steps) * module.attn_scale + 1.0).view(1, -1, 1, 1)).to(q.dtype)


def _checked(
    module: nn.Module,
    operands: QueryKeyValue,
    mask: Any,
    scores: ScoreOptions,
    others: dict[str, Any],
) -> LayerCall:
    session, layer = enabled_layer(module)
    call, shape = call_and_shape(module, session, mask, scores.is_causal)
    if mask is None and scores.sliding_window is not None:
        lost = f"it has a window of {scores.sliding_window} keys and no mask"
        raise ValueError(f"{lost}: a hook or other code has removed the mask")
    refuse_unknown(others)
    if scores.dropout:
        p = scores.dropout
        way_out = "set attention dropout to 0 in the config"
        raise ValueError(f"dropout is {p}, which attention over ranks does not offer: {way_out}")
    cached = _check_keys(call, layer, operands, shape)
    if layer.linear is not None:
        if shape != MaskShape(causal=True):
            raise ValueError(f"it is linear and takes only a causal mask, got {shape}")
        softmax_only = {
            "sinks": scores.s_aux is not None,
            "softcap": scores.softcap is not None,
            "other keys": layer.cross,
        }
        for name, given in softmax_only.items():
            if given:
                raise ValueError(f"it is linear and takes no {name}, which needs softmax attention")
    return LayerCall(session, layer, call, shape, scores, cached)


def _check_keys(
    call: ModelCall, layer: AttentionLayer, operands: QueryKeyValue, shape: MaskShape
) -> int | None:
    query, key, _ = operands
    side, _, rows = sides_of(call, layer)
    cached = None if call.cache is None else call.cache.layer_of(key)
    if call.decodes:
        rows = call.cache.rows_of(cached)
    for name, x, held in (("queries", query, side.tokens), ("keys", key, rows)):
        if x.dim() != 4 or x.shape[0] != 1 or x.shape[2] != held:
            expected = f"(1, heads, {held}, D), the tokens of the sharded batch"
            raise ValueError(f"its {name} must be {expected}, got {tuple(x.shape)}")
    if call.cache is not None:
        unbounded = shape.chunk is not None or shape.ranges is not None or shape.left < 0
        call.cache.attends(cached, None if unbounded or not shape.causal else shape.left)
    return cached


def _compute(own: LayerCall, q: Tensor, key: Tensor, value: Tensor) -> Tensor:
    call, layer, shape = own.call, own.layer, own.shape
    side, keys, _ = sides_of(call, layer)
    layout, kv_layout = side.layout, keys.layout
    if shape.chunk is not None and not call.decodes:
        layout, kv_layout = side.in_chunks(shape.chunk), keys.in_chunks(shape.chunk)
    k, v = key.transpose(1, 2), value.transpose(1, 2)
    if layer.linear is not None:
        return layer.linear(q, k, v, layout, own.scores.scaling)
    options = shape.arguments() | own.scores.arguments()
    if call.decodes:
        return call.cache.attend(own.cached, q, key, value, chunk=shape.chunk, **options)
    other = None if kv_layout is layout else kv_layout
    return own.session.attention(q, k, v, layout, kv_layout=other, **options)


def refuse_unknown(arguments: dict[str, Any], *known: str) -> None:
    given = [name for name, x in arguments.items() if x is not None and x is not False]
    unknown = [name for name in given if name not in _HARMLESS and name not in known]
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))} is given, which seqpar does not support")


def sides_of(call: ModelCall, layer: AttentionLayer) -> tuple[Side, Side, int]:
    """Return which tokens this rank holds of a layer's queries, which tokens it holds of the
    layer's keys, and the number of these keys.
    """
    side = call.side(layer.in_encoder)
    keys = call.side(layer.in_encoder or layer.cross)
    return side, keys, call.cache.store.rows if call.decodes else keys.tokens


def call_and_shape(
    module: nn.Module, session: EnabledModel, mask: Any, is_causal: bool | None
) -> tuple[ModelCall, MaskShape]:
    """Return the running call of the model that contains the layer, and which keys a query of the
    layer attends to.
    """
    if isinstance(mask, ShardedMask):
        if mask.call.session is not session:
            raise ValueError(
                "its mask must be made in a call of its own model, got a mask of a different model"
            )
        return mask.call, mask.pattern
    if mask is not None:
        found = f"tensor {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"its mask is a {found} that the model made itself")
    call = current.call
    if call is None or call.session is not session:
        reason = "it was called outside of the model, or recomputed without its mask"
        raise ValueError(f"it has no sharded batch: {reason}")
    check_packing(call.sharding.main, separates=False)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return call, MaskShape(causal=bool(causal))


# Used to turn a softmax model into a hybrid model and continue its training (LASP-2H in Sun et al.,
# "LASP-2", 2025).
@dataclass(eq=False)
class LinearLayer:
    """The linear attention that a layer computes in place of softmax attention."""

    attention: LASP2Attention
    feature_map: FeatureMap | None
    log_decay: Tensor | None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, scaling: float | None
    ) -> Any:
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        if self.feature_map is not None:
            q, k = self.feature_map(q), self.feature_map(k)
        return self.attention(q, k, v, layout, log_decay=self.log_decay, scale=scale)

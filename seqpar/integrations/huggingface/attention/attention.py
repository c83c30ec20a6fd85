"""The attention and the mask that transformers' layers call under the name "seqpar"."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.integrations.huggingface.attention.buckets import (
    attend_in_buckets,
    masks_of,
)
from seqpar.integrations.huggingface.attention.call import (
    ModelCall,
    PreparedMask,
    Session,
    ShardedMask,
    current,
)
from seqpar.integrations.huggingface.attention.counting import counted, counted_backward, counting
from seqpar.integrations.huggingface.attention.guard import guard_models
from seqpar.integrations.huggingface.attention.linear_layers import check_linear
from seqpar.integrations.huggingface.attention.masks import MaskShape, is_packed, read_mask
from seqpar.integrations.huggingface.batch.sharding import KEY, Side
from seqpar.integrations.huggingface.model.code import has_buckets
from seqpar.integrations.huggingface.model.layers import AttentionLayer

NAME = "seqpar"  # of the attention implementation, in all models

# What layers are passed besides what attention needs: nothing of it changes what they compute.
_HARMLESS = {
    "cache_position",
    "image_grid_thw",
    "image_sizes",
    "layer_idx",
    "logits_to_keep",
    "mm_token_type_ids",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "pixel_values",
    "pixel_values_videos",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "token_type_ids",
    "training",
    "use_cache",
    "video_grid_thw",
}


def register(session: Session) -> None:
    """Make a model's attention layers known, and the name too, the first time."""
    from transformers import AttentionInterface, AttentionMaskInterface

    guard_models()
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, describe_mask)
    for module, layer in session.layers.items():
        layer.session = session
        setattr(module, KEY, layer)


def unregister(session: Session) -> None:
    """Forget a model's attention layers."""
    for module in session.layers:
        vars(module).pop(KEY, None)


def session_of(module: nn.Module) -> Session | None:
    """Return the session whose model has the layer; None: none has, or has it in a copy.

    A layer's attributes are its own in a compiled graph, which layers share. An entry of a
    dictionary would be that of the layer with which the graph was traced.
    """
    layer = getattr(module, KEY, None)
    if not isinstance(layer, AttentionLayer):
        return None
    session: Session = layer.session
    return session if torch.compiler.is_compiling() or module in session.layers else None


def describe_mask(
    *args: Any, mask_function: Any = None, attention_mask: Any = None, **kwargs: Any
) -> ShardedMask:
    """Return the mask that layers pass on; transformers calls this once for each kind of layer.

    Raise a ValueError if the mask cannot be expressed.
    """
    if isinstance(attention_mask, PreparedMask):
        _check_prepared(attention_mask, mask_function)
        return attention_mask
    call = current.call
    if call is None:
        reason = "its batch must come through shard"
        raise ValueError(f"the model must be called itself while it is enabled: {reason}")
    with call.session.faults():
        if call.prepared is not None:
            return call.prepared
        offset = kwargs.get("q_offset", 0)
        if call.cache is None and (isinstance(offset, Tensor) or offset != 0):
            raise ValueError("past_key_values must be of sp.cache(): its keys are sharded")
        whole = call.sharding.whole and not call.entered
        if attention_mask is not None and not whole and not attention_mask.all():
            raise ValueError("attention_mask must go through shard, which makes documents of it")
        if not whole and call.cache is None:
            _check_packing(call.sharding.main, mask_function)
        try:
            documents = call.sharding.main.documents if whole else None
            shape = read_mask(mask_function, documents)
        except ValueError as reason:
            config = type(kwargs.get("config")).__name__
            raise ValueError(f"a mask of {config} cannot be expressed: {reason}") from None
    return ShardedMask(call, shape)


def _check_packing(side: Side, function: Any) -> None:
    """Raise a ValueError if a mask does not read of positions that jump what `shard` did."""
    packed, positions = side.documents.packed, side.position_ids
    if packed is None or positions is None or positions.dim() != 2:
        return
    jumps = bool((positions.diff() != 1).any())
    if jumps and is_packed(function) != packed:
        kept = "keeps as positions" if packed else "begins documents at"
        raise ValueError(f"position_ids have jumps, which a mask of this model {kept}: give a mask")


def _check_prepared(mask: PreparedMask, function: Any) -> None:
    """Raise a ValueError if a model's layers are not known to have the mask prepared for them.

    All that a compiled graph can read of the model's function is its name.
    """
    name = function.__name__
    bounded = mask.seen.left >= 0 or mask.seen.chunk is not None
    if name != ("and_mask" if bounded else "causal_mask_function"):
        raise ValueError(f"the model cannot be compiled: its layers have another mask, of {name}")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    band: MaskShape | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention over all ranks: q, k, v (1, H, T_local, D) to (1, T_local, H, D).

    As in transformers' sdpa, the mask says the window, not `sliding_window`. `band` is of the layer
    itself, beside the mask, and `alibi_slopes` (H,) are what is added for a key's position. Raise a
    ValueError naming the layer and the reason if it cannot be computed.
    """
    session = session_of(module)
    if session is None:
        where = f"a layer {type(module).__name__} is not of an enabled model"
        raise ValueError(f"{where}: copy a model before you enable it")
    layer: AttentionLayer = getattr(module, KEY)
    with session.faults(layer.name):
        call, shape = call_and_shape(module, session, attention_mask, is_causal)
        if band is not None:
            shape = shape & band
        if alibi_slopes is not None and not shape.causal:
            raise ValueError("it has ALiBi's bias of keys behind their queries, and no causal mask")
        bias = kwargs.pop("position_bias", None) if has_buckets(module) else None
        if layer.cross and bias is not None:
            bias = None  # zeros
        refuse_unknown(kwargs)
        if dropout:
            raise ValueError(f"dropout is {dropout}, and over sharded keys there is none")
        side, keys, rows = sides_of(call, layer)
        decodes = call.cache is not None and call.cache.decodes
        cached = None if call.cache is None else call.cache.layer_of(key)
        if decodes:
            rows = call.cache.rows_of(cached)
        for name, x, held in (("queries", query, side.tokens), ("keys", key, rows)):
            if x.dim() != 4 or x.shape[0] != 1 or x.shape[2] != held:
                expected = f"(1, heads, {held}, D), the tokens of the sharded batch"
                raise ValueError(f"its {name} are {tuple(x.shape)}, not {expected}")
        if call.cache is not None:
            unbounded = shape.chunk is not None or shape.ranges is not None or shape.left < 0
            call.cache.attends(cached, None if unbounded or not shape.causal else shape.left)
            if bias is not None:
                raise ValueError("it has a bias by distances, which steps with a cache do not")
        if layer.linear is not None:
            given = {"sinks": s_aux is not None, "softcap": softcap, "other keys": layer.cross}
            biased = bias is not None or alibi_slopes is not None
            check_linear(shape, given | {"a bias": biased})
        masks = None if bias is None else masks_of(module, bias, shape, side.documents, call.masks)
    layout, kv_layout = side.layout, keys.layout
    if shape.chunk is not None and not decodes:
        layout, kv_layout = side.in_chunks(shape.chunk), keys.in_chunks(shape.chunk)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scores = {"softmax_scale": scaling, "softcap": softcap, "sinks": s_aux}
    if alibi_slopes is not None:
        scores["alibi_slopes"] = alibi_slopes
    options = shape.arguments() | scores

    def softmax(q: Tensor) -> Tensor:
        if layer.linear is not None:
            found: Tensor = layer.linear(q, k, v, layout, scaling)
        elif decodes:
            found = call.cache.attend(cached, q, key, value, chunk=shape.chunk, **options)
        else:
            other = None if kv_layout is layout else kv_layout
            if bias is None or masks is None:
                found = session.attention(q, k, v, layout, kv_layout=other, **options)
            else:
                of = partial(session.attention, q, k, v, layout, kv_layout=other, **scores)
                found = attend_in_buckets(bias, masks, of)
        return found

    if torch.compiler.is_compiling():
        return counted(layer.counter, q, softmax), None
    with counting(layer, session.comm, q, decodes) as queries:
        out = softmax(queries)
    return counted_backward(layer, session.comm, out), None


def refuse_unknown(given: dict[str, Any], *known: str) -> None:
    """Raise a ValueError if a layer is given what may change what it computes, but for `known`."""
    unknown = [
        name
        for name, x in given.items()
        if name not in _HARMLESS.union(known) and x is not None and x is not False
    ]
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))} is given, which is not understood here")


def sides_of(call: ModelCall, layer: AttentionLayer) -> tuple[Side, Side, int]:
    """Return the tokens of a layer's queries and of its keys, and how many keys this rank has."""
    side = call.side(layer.in_encoder)
    keys = call.side(layer.in_encoder or layer.cross)
    decodes = call.cache is not None and call.cache.decodes
    return side, keys, call.cache.store.rows if decodes else keys.tokens


def call_and_shape(
    module: nn.Module, session: Session, mask: Any, is_causal: bool | None
) -> tuple[ModelCall, MaskShape]:
    """Return the model's call that a layer is in, and which keys its queries see."""
    if isinstance(mask, ShardedMask):
        if mask.call.session is not session:
            raise ValueError("its mask is of another model's call")
        return mask.call, mask.seen
    if mask is not None:
        found = f"tensor {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"its mask is a {found} that the model made itself")
    call = current.call
    if call is None or call.session is not session:
        reason = "it was called outside of the model, or recomputed without its mask"
        raise ValueError(f"it has no sharded batch: {reason}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return call, MaskShape(causal=bool(causal))

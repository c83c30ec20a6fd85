"""The attention and the mask that transformers' layers call under the name "seqpar"."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from seqpar.comm.exchange import Comm
from seqpar.integrations.huggingface.buckets import (
    Masks,
    attend_in_buckets,
    has_buckets,
    masks_of,
)
from seqpar.integrations.huggingface.counting import counted_backward, counting
from seqpar.integrations.huggingface.layers import Layer
from seqpar.integrations.huggingface.linear_layers import check_linear
from seqpar.integrations.huggingface.masks import MaskShape, read_mask
from seqpar.integrations.huggingface.sharding import Sharding, Side
from seqpar.softmax.module import Attention

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


class Session(Protocol):
    """What attention needs to know of an enabled model."""

    comm: Comm
    attention: Attention
    layers: dict[nn.Module, Layer]
    records: bool  # whether layers compute attention by themselves

    def faults(self, layer: str | None = None) -> AbstractContextManager[None]:
        """Raise faults on all ranks."""
        ...


@dataclass(eq=False)
class Call:
    """A call of a model, while it runs and until its backward has run.

    `labels` and `items` are its labels and by what to divide their loss, if the user says that;
    `reached` are the layers that it has come through, and `entered` says whether it has come to the
    model of its text, where there is another beside it, with a mask that was `prepared` before.
    `masks` are those of the buckets of distances, in an encoder or in a decoder. `cache` has its
    keys, and `joined` says whether its outputs will be put together.
    """

    session: Session
    sharding: Sharding
    labels: Tensor | None = None
    items: int | Tensor | None = None
    reached: set[nn.Module] = field(default_factory=set)
    entered: bool = False
    prepared: ShardedMask | None = None
    masks: dict[bool, Masks] = field(default_factory=dict)
    cache: Any = None
    joined: bool = True

    def side(self, encoder: bool) -> Side:
        """Return the encoder's tokens or the others'."""
        side = self.sharding.encoder if encoder else self.sharding.main
        assert side is not None
        return side


@dataclass(frozen=True, eq=False)
class ShardedMask:
    """What layers are given as their mask: it goes with checkpointed layers into backward."""

    call: Call
    shape: MaskShape

    def __getattr__(self, name: str) -> Any:
        if name in ("ndim", "to") and self.call.session.records:
            return 0 if name == "ndim" else lambda *_, **__: self
        if hasattr(Tensor, name):
            raise ValueError(
                f"the model's layers make another mask of theirs: they read its {name}"
            )
        raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        raise ValueError("the model's layers make another mask of theirs: they cut it")


current: ContextVar[Call | None] = ContextVar("seqpar_call", default=None)
_sessions: weakref.WeakKeyDictionary[nn.Module, Session] = weakref.WeakKeyDictionary()


def register(session: Session) -> None:
    """Make a model's attention layers known, and the name too, the first time."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, describe_mask)
    _sessions.update(dict.fromkeys(session.layers, session))


def unregister(session: Session) -> None:
    """Forget a model's attention layers."""
    for layer in session.layers:
        _sessions.pop(layer, None)


def session_of(layer: nn.Module) -> Session | None:
    """Return the session whose model has the layer."""
    return _sessions.get(layer)


def describe_mask(
    *args: Any, mask_function: Any = None, attention_mask: Any = None, **kwargs: Any
) -> ShardedMask:
    """Return the mask that layers pass on; transformers calls this once for each kind of layer.

    Raise a ValueError if the mask cannot be expressed.
    """
    call = current.get()
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
        try:
            documents = call.sharding.main.documents if whole else None
            shape = read_mask(mask_function, documents)
        except ValueError as reason:
            config = type(kwargs.get("config")).__name__
            raise ValueError(f"a mask of {config} cannot be expressed: {reason}") from None
    return ShardedMask(call, shape)


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
    layer = session.layers[module]
    with session.faults(layer.name):
        call, shape = call_and_shape(module, session, attention_mask, is_causal)
        if band is not None:
            shape = shape & band
        if alibi_slopes is not None and not shape.causal:
            raise ValueError("it has ALiBi's bias of keys behind their queries, and no causal mask")
        bias = kwargs.pop("position_bias", None) if has_buckets(module) else None
        if layer.cross and bias is not None:
            bias = None  # zeros
        unknown = [
            name
            for name, given in kwargs.items()
            if name not in _HARMLESS and given is not None and given is not False
        ]
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))} is given, which is not understood here")
        if dropout:
            raise ValueError(f"dropout is {dropout}, and over sharded keys there is none")
        side, keys, rows = sides_of(call, layer)
        decodes = call.cache is not None and call.cache.decodes
        for name, x, held in (("queries", query, side.tokens), ("keys", key, rows)):
            if x.dim() != 4 or x.shape[0] != 1 or x.shape[2] != held:
                expected = f"(1, heads, {held}, D), the tokens of the sharded batch"
                raise ValueError(f"its {name} are {tuple(x.shape)}, not {expected}")
        if call.cache is not None:
            call.cache.check(key)
            if bias is not None:
                raise ValueError("it has a bias by distances, which steps with a cache do not")
        if layer.linear is not None:
            given = {"sinks": s_aux is not None, "softcap": softcap, "other keys": layer.cross}
            biased = bias is not None or alibi_slopes is not None
            check_linear(shape, given | {"a bias": biased})
        masks = None if bias is None else masks_of(module, bias, shape, side.documents, call.masks)
    call.reached.add(module)
    layout, kv_layout = side.layout, keys.layout
    if shape.chunk is not None and not decodes:
        layout, kv_layout = layout.chunked(shape.chunk), kv_layout.chunked(shape.chunk)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scores = {"softmax_scale": scaling, "softcap": softcap, "sinks": s_aux}
    if alibi_slopes is not None:
        scores["alibi_slopes"] = alibi_slopes
    options = shape.arguments() | scores
    with counting(layer, session.comm, q, decodes) as counted:
        if layer.linear is not None:
            out = layer.linear(counted, k, v, layout, scaling)
        elif decodes:
            out = call.cache.attend(counted, key, value, chunk=shape.chunk, **options)
        else:
            other = None if kv_layout is layout else kv_layout
            if bias is None or masks is None:
                out = session.attention(counted, k, v, layout, kv_layout=other, **options)
            else:
                softmax = partial(
                    session.attention, counted, k, v, layout, kv_layout=other, **scores
                )
                out = attend_in_buckets(bias, masks, softmax)
    return counted_backward(layer, session.comm, out), None


def sides_of(call: Call, layer: Layer) -> tuple[Side, Side, int]:
    """Return the tokens of a layer's queries and of its keys, and how many keys this rank has."""
    side = call.side(layer.in_encoder)
    keys = call.side(layer.in_encoder or layer.cross)
    decodes = call.cache is not None and call.cache.decodes
    return side, keys, call.cache.store.rows if decodes else keys.tokens


def call_and_shape(
    module: nn.Module, session: Session, mask: Any, is_causal: bool | None
) -> tuple[Call, MaskShape]:
    """Return the model's call that a layer is in, and which keys its queries see."""
    if isinstance(mask, ShardedMask):
        if mask.call.session is not session:
            raise ValueError("its mask is of another model's call")
        return mask.call, mask.shape
    if mask is not None:
        found = f"tensor {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"its mask is a {found} that the model made itself")
    call = current.get()
    if call is None or call.session is not session:
        reason = "it was called outside of the model, or recomputed without its mask"
        raise ValueError(f"it has no sharded batch: {reason}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return call, MaskShape(causal=bool(causal))

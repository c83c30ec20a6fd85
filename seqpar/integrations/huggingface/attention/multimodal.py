"""Models that insert features of images or sound into text. Only the text model is spread over
ranks.

Before the text model is called, every rank computes the whole batch, as a single process would: all
images, and the embeddings of all tokens. The text model then computes only this rank's tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from seqpar.integrations.huggingface.attention.call import ModelCall, ShardedMask, current
from seqpar.integrations.huggingface.batch.sharding import Side, side_of
from seqpar.integrations.huggingface.model.code import dispatches, takes
from seqpar.integrations.huggingface.model.layers import most_dropped, random_settings

_FEATURES = {
    "deepstack_visual_embeds": "visual_pos_masks",
    "image_embeds": "image_embeds_position_mask",
}  # image features of the text model -> the argument that marks their tokens


def _text_of(model: Any) -> Any:
    """Return the text model inside a model for text and images or sound. Return None if the model
    is only for text.
    """
    config = model.config
    text_config = config.get_text_config()
    if text_config is config or getattr(config, "is_encoder_decoder", False):
        return None
    text = model.get_decoder()
    return text if isinstance(text, nn.Module) and text is not model.base_model else None


class OutsideText:
    def __init__(self, model: Any) -> None:
        self.text = _text_of(model)  # None if the model has no other part
        self.body: Any = model if self.text is None else self.text
        self.name = next(name for name, x in model.named_modules() if x is self.body)
        around = {x for x in model.modules() if self.body in set(x.modules())}
        parts = {
            f"{name}.{child}".lstrip("."): part
            for name, x in model.named_modules()
            if x in around and x is not self.body
            for child, part in x.named_children()
            if part not in around
        }
        inside = {
            f"{name}.{child}": x
            for name, part in parts.items()
            for child, x in part.named_modules()
        }
        self.modules = set(inside.values())  # modules that neither belong to `body` nor contain it
        self.whole = tuple(  # names of parts with attention, which each rank computes whole
            name for name, part in parts.items() if any(dispatches(type(x)) for x in part.modules())
        )
        self._dropping = {name: (x, p) for name, x in inside.items() if (p := most_dropped(x)) > 0}
        self._random = {
            name: (x, found) for name, x in inside.items() if (found := random_settings(x))
        }
        self.check()

    def check(self) -> None:
        for name, (x, settings) in self._random.items():
            if x.training:
                reason = (
                    f"{name} has {', '.join(settings)}, and would draw different numbers "
                    "on each rank"
                )
                way_out = "set them to None in its config, or call eval() of this part"
                what = "model must draw no random numbers outside of its text"
                raise ValueError(f"{what}, but {reason}: {way_out}")
        for name, (x, p) in self._dropping.items():
            if x.training:
                reason = (
                    f"{name} has a dropout of {p}, which would differ between ranks: set "
                    "it to 0 in the config"
                )
                raise ValueError(f"model must have no dropout outside of its text, but {reason}")


def take_tokens(text: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cut the arguments of the text model to this rank's tokens, as a forward pre-hook."""
    call = current.call
    cached = call is not None and call.cache is not None
    if not cached and takes(text, "use_cache"):
        kwargs = kwargs | {"use_cache": False}  # the outer model may not pass this argument on
    if call is None or not call.sharding.whole:  # only text, or a step after the images
        if call is not None and isinstance(mask := kwargs.get("attention_mask"), ShardedMask):
            call.prepared, kwargs = mask, kwargs | {"attention_mask": None}
        return args, kwargs
    with call.session.faults():
        if args or call.entered:
            raise ValueError(
                "the model must call its text model once, with keyword arguments "
                "only, got other calls"
            )
        call.entered = True
        return (), _taken(call, kwargs)


def _taken(call: ModelCall, kwargs: dict[str, Any]) -> dict[str, Any]:
    side = call.sharding.main
    positions = kwargs.get("position_ids")
    if positions is not None:
        x = next(x for x in kwargs.values() if isinstance(x, Tensor))
        rank = call.session.comm.rank
        side = side_of(side.documents, side.layout, rank, positions, x.device)
        call.sharding = call.sharding.with_sides(side)
    taken: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name == "position_ids":
            value = side.position_ids
        elif name == "attention_mask":
            value = _mask(value, call)
        elif name in _FEATURES and value is not None:
            cut = partial(_rows, visual=kwargs[_FEATURES[name]], side=side)
            value = cut(value) if isinstance(value, Tensor) else list(map(cut, value))
        elif isinstance(value, Tensor) and tuple(value.shape[:2]) == side.shape:
            value = side.take(value, None if value.is_floating_point() else 0)
        taken[name] = value
    return taken | {"position_ids": side.position_ids}


def _mask(mask: Any, call: ModelCall) -> Any:
    """Return the argument `attention_mask` for the text model.

    If `mask` is one mask for all layers, it is stored in `call`, and the result is None. The result
    is also None if `mask` only marks padding.
    """
    side = call.sharding.main
    if isinstance(mask, ShardedMask):
        call.prepared = mask
        return None
    if isinstance(mask, Tensor) and tuple(mask.shape) == side.shape:
        side.documents.check_mask(mask)
        return None
    for x in mask.values() if isinstance(mask, dict) else [mask]:
        if x is not None and not isinstance(x, ShardedMask):
            found = f"a {type(x).__name__}, which the model made itself"
            raise ValueError(f"the mask of the text model must be transformers' own, got {found}")
    return mask


def _rows(x: Tensor, visual: Any, side: Side) -> Tensor:
    index = side.index.to(visual.device)
    shown = visual.flatten().bool()
    x = x.flatten(0, -2)
    own = index[(index >= 0) & shown[index.clamp(min=0)]]
    return x[(shown.cumsum(0) - 1)[own].to(x.device)]

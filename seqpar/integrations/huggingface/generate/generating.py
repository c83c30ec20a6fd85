"""`generate` of an enabled model: calls with a cache take and return whole batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.comm.messages.exchange import Comm
from seqpar.integrations.huggingface.attention.call import EnabledModel, ModelCall, current
from seqpar.integrations.huggingface.batch.shard_batch import BatchSharder, check_all_logits
from seqpar.integrations.huggingface.batch.sharding import KEY, Sharding, digest_of
from seqpar.integrations.huggingface.generate.cache import Cache, cache_type
from seqpar.integrations.huggingface.generate.steps import Kept, begun, kept_of_prefill, to_step
from seqpar.integrations.huggingface.loss.outputs import mark, tensors_in, unshard
from seqpar.integrations.huggingface.model.layers import Uncopied, check_reached, encoder_of
from seqpar.integrations.huggingface.model.patched_globals import Replaced

_drawing: ContextVar[bool] = ContextVar("seqpar_drawing", default=False)


class Generation(Uncopied):
    """The hooks of an enabled model for calls with a cache. `groups` come from `groups_of`."""

    def __init__(
        self, session: EnabledModel, sharder: BatchSharder, groups: list[list[set[nn.Module]]]
    ) -> None:
        self._session, self._sharder = session, sharder
        self._groups = groups
        self._tokens: list[tuple[ModelCall | None, Kept | None]] = []
        inner = session.inner
        self._handles: list[Any] = [
            inner.register_forward_pre_hook(self._before, with_kwargs=True),
            inner.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]
        self._has_routers = "output_router_logits" in inspect.signature(inner.forward).parameters
        self._own = vars(inner).get("generate")
        if hasattr(inner, "generate"):
            # Set on the model, so that other models of its class keep theirs. transformers has no
            # other public way to add a cache; `_prepare_cache_for_generation` is private.
            self._handles.append(Replaced(inner, "generate", MethodType(_generate, inner)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def takes(self, kwargs: dict[str, Any]) -> bool:
        return isinstance(kwargs.get("past_key_values"), Cache)

    def cache(self, block: int, reserve: int) -> Cache:
        if encoder_of(self._session.inner) is not None:
            raise ValueError("model must have no encoder: the keys that it makes have no cache")
        for layer in self._session.layers.values():
            if layer.recurrence is not None:
                raise ValueError(f"{layer.name} is recurrent: it has states, which no cache keeps")
        return cache_type()(self._session.attention, block=block, reserve=reserve)

    def generate(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run transformers' `generate` with a cache over the ranks, and rank 0's random numbers."""

        def check() -> Cache:
            if model is not self._session.inner:
                raise ValueError("the model is a copy of one that is enabled")
            configs = kwargs.get("generation_config"), getattr(model, "generation_config", None)
            for name, (kept, reason) in _REFUSED.items():
                values = [kwargs.get(name), *(getattr(x, name, None) for x in configs)]
                value = next((x for x in values if x is not None), kept)
                if value not in (kept, "hybrid"):  # Gemma's; transformers replaces it
                    raise ValueError(f"{name} must be {kept}, got {value!r}: {reason}")
            given = kwargs.get("past_key_values")
            if given is None:
                return self.cache(64, 0)
            if not self.takes(kwargs):
                found = type(given).__name__
                raise ValueError(f"past_key_values must be None or of sp.cache(), got {found}")
            return given

        cache = self._session.agree(check, lambda: _settings(model, args, kwargs))
        own = self._own or MethodType(type(model).generate, model)  # type: ignore[attr-defined]
        with _random_numbers_of_rank_0(self._session.comm):
            return own(*args, **kwargs | {"past_key_values": cache})

    def _before(self, inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.takes(kwargs):
            return None
        kwargs = dict(kwargs)
        cache: Cache = kwargs.pop("past_key_values")

        def resolve() -> tuple[dict[str, Any], ModelCall, Kept | None, Any]:
            self._check(inner, args, kwargs, cache)
            return self._resolved(cache, kwargs)

        def shared() -> dict[str, Any]:
            described = {"past_key_values": repr(cache), "keywords": sorted(kwargs)}
            described["training"] = str(inner.training)
            if isinstance(sharding := kwargs.get(KEY), Sharding):
                return described | {"batch": sharding.digest()}
            names = ["input_ids", "inputs_embeds", "position_ids"]
            if not cache.is_initialized:  # masks of later calls are compared with this one
                names.append("attention_mask")
            return described | {name: digest_of(kwargs.get(name)) for name in names}

        made, call, kept, start = self._session.agree(resolve, shared)
        start()
        if kept is not None:
            made["logits_to_keep"] = kept.index
        self._tokens.append((current.set(call), kept))
        if self._has_routers:
            made["output_router_logits"] = False  # the loss of a config's True would be local
        return args, made | {"past_key_values": cache, "use_cache": True}

    def _check(
        self, inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], cache: Cache
    ) -> None:
        if inner is not self._session.inner:
            raise ValueError("the model is a copy of one that is enabled")
        if not cache.is_of(self._session.attention):
            raise ValueError("past_key_values must be of this model's sp.cache()")
        for layer in self._session.layers.values():
            if layer.linear is not None:
                raise ValueError(f"{layer.name} is linear: it has states, which no cache keeps")
        if args:
            raise ValueError("the model must be called with keywords only, as in model(**batch)")
        if kwargs.get("use_cache") is False:
            reason = "without keys of earlier calls each call is a whole prefill"
            raise ValueError(f"use_cache must be True: {reason}; call model(**sp.shard(batch))")
        for name in ("labels", "shift_labels", "output_router_logits"):
            if kwargs.get(name) is not None and kwargs[name] is not False:
                raise ValueError(f"{name} must be None in a call with past_key_values")
        if inner.training and any(isinstance(x, nn.Dropout) and x.p for x in inner.modules()):
            reason = "it has dropout, another on each rank"
            raise ValueError(f"model must be in eval() for calls with past_key_values: {reason}")
        if isinstance(kwargs.get("logits_to_keep"), Tensor):
            raise ValueError("logits_to_keep must be a number in a call with past_key_values")
        if kwargs.get(KEY) is not None:
            check_all_logits(kwargs)
        if kwargs.get(KEY) is not None and cache.is_initialized:
            raise ValueError("past_key_values must be empty where the batch is sharded")

    def _resolved(
        self, cache: Cache, kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], ModelCall, Kept | None, Callable[[], None]]:
        """Return the arguments, the call, the tokens with logits, and a function to begin it."""
        kwargs = {name: x for name, x in kwargs.items() if name != "use_cache"}
        session = self._session
        if cache.is_initialized:
            made, sharding, kept = to_step(session.inner, cache, kwargs)
            tokens = sharding.main.documents.columns
            self._sharder.check(made, sharding)
            call = ModelCall(session, sharding, cache=cache)
            return made, call, kept, lambda: cache.extend(tokens)
        whole = kwargs.get(KEY) is None
        made = self._sharder.shard(kwargs, cached=True) if whole else dict(kwargs)
        sharding = made.pop(KEY)
        self._sharder.check(made, sharding)
        side = sharding.main
        layout, padding = begun(side)
        kept = None
        if whole:
            count = made.pop("logits_to_keep", None) or 0
            kept = kept_of_prefill(layout, session.comm.rank, count, side.index.device)
        call = ModelCall(session, sharding, cache=cache, joined=whole)
        columns = side.documents.columns
        return made, call, kept, lambda: cache.begin(layout, columns, padding)

    def _after(self, inner: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
        """Return whole outputs. Runs after a failure too."""
        call = current.call
        if not self._tokens or call is None or call.cache is None:
            return None
        before, kept = self._tokens.pop()
        current.set(before)
        if outputs is None:
            call.cache.abort()
            return None
        check_reached(self._groups, self._session.layers, call.reached)
        call.cache.finish()
        if call.joined:
            outputs = _whole(outputs, call.sharding, kept, self._session.comm)
        else:
            mark(outputs, call.sharding)
        if self._session.comm.size > 1:
            for _, x in tensors_in(outputs):
                if x.requires_grad:
                    x.register_hook(_refuse_gradient)
        return outputs


_KEYS_STAY = "keys stay on their ranks, in a cache of seqpar's"
_REFUSED = {  # setting of `generate`: the only value that it may have, and the reason
    "cache_implementation": (None, _KEYS_STAY),
    "use_cache": (True, _KEYS_STAY),
    "max_time": (None, "ranks have clocks of their own, and must end with the same token"),
    "guidance_scale": (1, "the prompt without guidance would need a cache of its own"),
    "assistant_early_exit": (None, "a call must go through all attention layers"),
}


def _refuse_gradient(_: Tensor) -> None:
    how = "call model(**sp.shard(batch)) without a cache"
    raise ValueError(f"past_key_values must be None where gradients are needed: {how}")


def _settings(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, by name, that change tokens and must agree on all ranks."""
    configs = kwargs.get("generation_config"), getattr(model, "generation_config", None)
    named: dict[str, Any] = {}
    for config in reversed(configs):
        if hasattr(config, "to_dict"):
            named |= {str(name): x for name, x in config.to_dict().items()}
    named |= {f"{i}. argument": x for i, x in enumerate(args)} | kwargs
    named.pop("generation_config", None)
    if named.get("num_beams") in (None, 1):
        named.pop("streamer", None)
    optional = ("stopping_criteria", "logits_processor", "streamer", "inputs", "input_ids")
    named = dict.fromkeys((*optional, "min_new_tokens", "max_new_tokens")) | named
    return {name: _described(named[name]) for name in sorted(named)} | {"settings": sorted(named)}


def _described(x: Any, depth: int = 3) -> Any:
    """Return a text, or texts, that are the same for equal settings of two processes."""
    if isinstance(x, Tensor):
        return f"{tuple(x.shape)} {digest_of(x)}"
    if x is None or isinstance(x, bool | int | float | str):
        return repr(x)
    if not depth:
        return type(x).__name__
    if isinstance(x, dict):
        return {str(name): _described(value, depth - 1) for name, value in x.items()}
    if isinstance(x, list | tuple | set):
        return [_described(value, depth - 1) for value in x]
    if isinstance(x, nn.Module | Cache) or (callable(x) and not hasattr(x, "__dict__")):
        return type(x).__name__
    kept = {
        name: _described(value, depth - 1)
        for name, value in getattr(x, "__dict__", {}).items()
        if value is None or isinstance(value, bool | int | float | str | Tensor | list | tuple)
    }
    return {"type": getattr(x, "__qualname__", type(x).__name__), **kept}


def _whole(outputs: Any, sharding: Sharding, kept: Kept | None, comm: Comm) -> Any:
    mark(outputs, sharding)
    made = {
        name: kept.put_back(x, comm) if kept and name == "logits" else unshard(x, None, comm)
        for name, x in outputs.items()
    }
    return type(outputs)(**made)


def _generate(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return getattr(model, KEY).generation.generate(model, args, kwargs)


@contextmanager
def _random_numbers_of_rank_0(comm: Comm) -> Iterator[None]:
    """Draw rank 0's random numbers on all ranks; afterwards the others continue with their own."""
    # `generate` chooses tokens in many places, but its generator's state is sent only once. Logits
    # have the same bits on all ranks, and the next call's check compares the tokens.
    if _drawing.get():  # an assistant's generate, called within its model's
        yield
        return
    device = comm.device
    sources: list[Any] = [torch.random]
    if device.type != "cpu":
        sources.append(torch.get_device_module(device))
    own = [source.get_rng_state() for source in sources]
    token = _drawing.set(True)
    try:
        for source, state in zip(sources, own, strict=True):
            first = comm.all_gather(state.to(device), label="random numbers")[0]
            source.set_rng_state(first.cpu())
        yield
    finally:
        _drawing.reset(token)
        if comm.rank:
            for source, state in zip(sources, own, strict=True):
                source.set_rng_state(state)

"""`generate` of an enabled model. Calls with a cache receive and return whole batches.

The first such call is a sharded *prefill*; *decoding steps* follow it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from seqpar.comm.messages.comm import Comm
from seqpar.integrations.huggingface.attention.call import EnabledModel, ModelCall, current
from seqpar.integrations.huggingface.batch.documents import BatchDocuments, shape_of
from seqpar.integrations.huggingface.batch.shard_batch import BatchSharder, check_all_logits
from seqpar.integrations.huggingface.batch.sharding import (
    KEY,
    Sharding,
    Side,
    digest_of,
    has_tokens_of_rank,
    readable,
    scalars_of,
)
from seqpar.integrations.huggingface.generate.cache import Cache, cache_type
from seqpar.integrations.huggingface.loss.outputs import mark, tensors_in, unshard
from seqpar.integrations.huggingface.model.layers import (
    Uncopied,
    default_positions,
    encoder_of,
    faults_of_adapters,
    most_dropped,
)
from seqpar.integrations.huggingface.model.replaced import Replaced
from seqpar.layout.layout import Layout

_drawing: ContextVar[bool] = ContextVar("seqpar_drawing", default=False)


class Generation(Uncopied):
    """The hooks of an enabled model for calls with a cache."""

    def __init__(self, session: EnabledModel, sharder: BatchSharder) -> None:
        self._session, self._sharder = session, sharder
        # For each running call of the model: the call within which it runs; the tokens whose logits
        # are computed (None means all); the number of last logits per row that are returned (0
        # means all).
        self.outer_calls: list[tuple[ModelCall | None, Kept | None, int]] = []
        inner = session.inner
        self._handles: list[Any] = [
            inner.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]
        self._has_routers = "output_router_logits" in inspect.signature(inner.forward).parameters
        self._own = vars(inner).get("generate")
        if hasattr(inner, "generate"):
            # The method is set on this model only, not on its class. transformers has no public
            # hook for the cache of `generate`: `_prepare_cache_for_generation` is private.
            self._handles.append(Replaced(inner, "generate", MethodType(_generate, inner)))
            own = inner.prepare_inputs_for_generation
            self._handles.append(Replaced(inner, own.__name__, _keep_cache(own)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def cache(self, block: int, reserve: int) -> Cache:
        if encoder_of(self._session.inner) is not None:
            raise ValueError("model must have no encoder, whose keys a sharded cache cannot store")
        for layer in self._session.layers.values():
            if layer.recurrence is not None:
                raise ValueError(
                    f"model must have no recurrent layers for a cache, got {layer.name}: a sharded "
                    "cache cannot store states"
                )
        return cache_type()(self._session.attention, block=block, reserve=reserve)

    def generate(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run transformers' `generate` with a cache over the ranks. All ranks draw rank 0's random
        numbers.
        """
        own = self._own or MethodType(type(model).generate, model)  # type: ignore[attr-defined]
        named = _by_name(own, args) | kwargs

        def check() -> Cache:
            if model is not self._session.inner:
                raise ValueError(
                    "the model is a copy of one that is enabled: call the enabled model"
                )
            if KEY in named or any(map(has_tokens_of_rank, named.values())):
                how = "call model.generate(**batch), which shards the prompts itself"
                raise ValueError(f"batch must be whole for generate, got a sharded one: {how}")
            # If PEFT wrapped the model after `enable`, PEFT has replaced this method.
            around = getattr(model.prepare_inputs_for_generation, "__self__", None)
            if reasons := faults_of_adapters([around]):
                raise ValueError(reasons[0])
            for name, (kept, reason) in _REFUSED.items():
                configs = _configs(model, named)
                values = [named.get(name), *(getattr(x, name, None) for x in configs)]
                value = next((x for x in values if x is not None), kept)
                if value not in (kept, "hybrid"):  # Gemma's default, which transformers replaces
                    raise ValueError(f"{name} must be {kept}, got {value!r}: {reason}")
            given = named.get("past_key_values")
            if given is None:
                return self.cache(64, 0)
            if not isinstance(given, Cache):
                found = type(given).__name__
                raise ValueError(f"past_key_values must be None or of sp.cache(), got {found}")
            return given

        cache = self._session.agree(check, lambda: _settings(model, args, named))
        comm = self._session.comm
        with comm.telling_errors(), random_numbers_of_rank_0(comm):
            return own(*args, **kwargs | {"past_key_values": cache})

    def begin(
        self, inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Begin a call with a cache; return the arguments for the model on this rank."""
        self._session.abandon()  # in case a call was interrupted
        kwargs = readable(kwargs)
        cache: Cache = kwargs.pop("past_key_values")

        def shared() -> dict[str, Any]:
            described = {"past_key_values": repr(cache), "keywords": sorted(kwargs)}
            described |= {"training": str(inner.training)} | scalars_of(kwargs)
            if isinstance(sharding := kwargs.get(KEY), Sharding):
                return described | {"batch": sharding.digest()}
            names = ["input_ids", "inputs_embeds", "position_ids"]
            if not cache.is_initialized:  # the masks of later calls are compared with this mask
                names.append("attention_mask")
            return described | {name: digest_of(kwargs.get(name)) for name in names}

        resolve = partial(self._resolved, inner, args, kwargs, cache)
        made, call, kept, start = self._session.agree(resolve, shared)
        start()
        if kept is not None:
            made["logits_to_keep"] = kept.index
        last = kwargs.get("logits_to_keep") if kept is None else None
        self.outer_calls.append((current.set(call), kept, last or 0))
        if not call.decodes:
            self._session.mixing.begin(call)
        if self._has_routers:
            # Otherwise the model would compute the router loss of one rank's tokens.
            made["output_router_logits"] = False
        return args, made | {"past_key_values": cache, "use_cache": True}

    def _check(
        self, inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], cache: Cache
    ) -> None:
        if inner is not self._session.inner:
            raise ValueError("the model is a copy of one that is enabled")
        self._session.check_not_switched()
        if not cache.is_of(self._session.attention):
            raise ValueError("past_key_values must be a cache of this model's session, sp.cache()")
        for layer in self._session.layers.values():
            if layer.linear is not None:
                raise ValueError(
                    f"model must have no linear layers for a cache, got {layer.name}: a sharded "
                    "cache cannot store states"
                )
        if args:
            raise ValueError("the model must be called with keywords only, as in model(**batch)")
        if kwargs.get("use_cache") is False:
            reason = "without the keys of earlier calls, each call would compute all tokens again"
            raise ValueError(f"use_cache must be True: {reason}; call model(**sp.shard(batch))")
        for name in ("labels", "shift_labels", "output_router_logits"):
            if kwargs.get(name) is not None and kwargs[name] is not False:
                raise ValueError(
                    f"{name} must be None in a call with past_key_values: for a loss, call "
                    "model(**sp.shard(batch))"
                )
        if inner.training and any(most_dropped(x) > 0 for x in inner.modules()):
            reason = "its dropout or jitter would differ between ranks"
            raise ValueError(f"model must be in eval() for calls with past_key_values: {reason}")
        if inner.training and any(
            getattr(x, "gradient_checkpointing", False) for x in inner.modules()
        ):
            reason = "transformers gives no cache to blocks that are checkpointed"
            raise ValueError(f"model must be in eval() for calls with past_key_values: {reason}")
        if isinstance(kwargs.get("logits_to_keep"), Tensor):
            raise ValueError("logits_to_keep must be an int with past_key_values, got a tensor")
        if kwargs.get(KEY) is not None:
            check_all_logits(kwargs)
        if kwargs.get(KEY) is not None and cache.is_initialized:
            raise ValueError(
                "past_key_values must be empty for a batch that shard returned: call sp.cache() "
                "for each prompt"
            )

    def _resolved(
        self, inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], cache: Cache
    ) -> tuple[dict[str, Any], ModelCall, Kept | None, Callable[[], None]]:
        """Return four values: the arguments for the model on this rank, the call, the tokens whose
        logits are returned, and a function that begins the call.
        """
        self._check(inner, args, kwargs, cache)
        kwargs = {name: x for name, x in kwargs.items() if name != "use_cache"}
        session = self._session
        if cache.is_initialized:
            made, sharding, kept = _to_step(session.inner, cache, kwargs)
            tokens = sharding.main.documents.columns
            self._sharder.check(made, sharding)
            call = ModelCall(session, sharding, cache=cache)
            return made, call, kept, partial(cache.extend, tokens)
        whole = kwargs.get(KEY) is None
        made = self._sharder.shard(kwargs, cached=True) if whole else dict(kwargs)
        sharding = made.pop(KEY)
        self._sharder.check(made, sharding)
        if whole:
            self._sharder.check_tables(kwargs, sharding)
        side = sharding.main
        layout, padding = _prefill_layout(side)
        kept = None
        if whole:
            count = made.pop("logits_to_keep", None) or 0
            kept = _kept_of_prefill(layout, session.comm.rank, count, side.index.device)
        call = ModelCall(session, sharding, cache=cache, joined=whole)
        return made, call, kept, partial(cache.begin, layout, side.documents.columns, padding)

    def _after(self, inner: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
        """Return the outputs of the whole batch, as a hook after the model's forward. The hook also
        runs if the model raised an error.
        """
        call = current.call
        if not self.outer_calls or call is None or call.cache is None:
            return None
        before, kept, last = self.outer_calls.pop()
        checked = False
        try:
            if outputs is not None:
                self._session.mixing.end()
                checked = True
        finally:
            self._session.mixing.abandon()
            current.set(before)
            if not checked:
                call.cache.abort()
        if outputs is None:
            if (error := sys.exception()) is not None:
                self._session.comm.tell_error(error)
            return None
        call.check_reached()
        call.cache.finish()
        mark(outputs, call.sharding)
        comm = self._session.comm
        if call.joined:
            made = {
                name: kept.put_back(x, comm)
                if kept and name == "logits"
                else unshard(x, None, comm)
                for name, x in outputs.items()
            }
            if last:
                made["logits"] = made["logits"][:, -last:]
            outputs = type(outputs)(**made)
        if comm.size > 1:
            for _, x in tensors_in(outputs):
                if x.requires_grad:
                    x.register_hook(_refuse_gradient)
        return outputs


_PLAIN = (bool, int, float, str, type(None))
_KEYS_STAY = "keys stay on their ranks, in a cache of seqpar's"
_REFUSED = {  # setting of `generate` -> the only allowed value, and the reason
    "cache_implementation": (None, _KEYS_STAY),
    "use_cache": (True, _KEYS_STAY),
    "max_time": (None, "ranks have clocks of their own, and must end with the same token"),
    "guidance_scale": (1, "the prompt without guidance would need a cache of its own"),
    "assistant_early_exit": (None, "a call must go through all attention layers"),
    "output_attentions": (False, "no rank has all weights"),
    "use_mtp": (False, "the model that proposes tokens would not be enabled"),
}


def _refuse_gradient(_: Tensor) -> None:
    how = "call model(**sp.shard(batch)) without a cache"
    raise ValueError(f"past_key_values must be None where gradients are needed: {how}")


def _by_name(function: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    names = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    return dict(zip(names, args, strict=False))


def _configs(model: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return kwargs.get("generation_config"), getattr(model, "generation_config", None)


def _settings(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that must be equal on all ranks, because they change the generated
    tokens.
    """
    named: dict[str, Any] = {}
    for config in reversed(_configs(model, kwargs)):
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
    if isinstance(x, Tensor):
        return digest_of(x)
    if isinstance(x, _PLAIN):
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
        if isinstance(value, (*_PLAIN, Tensor, list, tuple))
    }
    return {"type": getattr(x, "__qualname__", type(x).__name__), **kept}


def _generate(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return getattr(model, KEY).generation.generate(model, args, kwargs)


def _keep_cache(own: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @wraps(own)
    def prepare_inputs(*args: Any, **kwargs: Any) -> dict[str, Any]:
        made, cache = own(*args, **kwargs), kwargs.get("past_key_values")
        # When its rotary factors change, Phi-3 drops its cache and computes all tokens again.
        if isinstance(cache, Cache) and made.get("past_key_values") is None:
            cache.reset()
            made["past_key_values"] = cache
        return made

    return prepare_inputs


@contextmanager
def random_numbers_of_rank_0(comm: Comm) -> Iterator[None]:
    """Within this context, draw rank 0's random numbers on all ranks. Afterwards, restore each
    rank's generator.
    """
    # Rank 0 sends the state of its generator only once. This suffices: all ranks compute logits
    # with the same bits, so they draw the same tokens. The check of each call compares the tokens.
    # `generate` of an assistant model, called within `generate` of the main model.
    if _drawing.get():
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


@dataclass(frozen=True, eq=False)
class DecodingStep(Side):
    """The tokens of a decoding step. The layers receive the B rows of T tokens as one row of B·T
    tokens.
    """

    # `layout` is the layout of the prefill. The new tokens are not part of it: every rank has them
    # all.

    def put_back(self, x: Tensor, comm: Comm) -> Tensor:
        """Reshape x (1, B·T, …) to (B, T, …)."""
        return x[0].unflatten(0, self.shape)


@dataclass(frozen=True, eq=False)
class Kept:
    """The last tokens of each row, whose logits a call returns, and the ranks that hold them."""

    rows: int
    index: Tensor  # indices of the kept tokens among the tokens that this rank computes
    layout: Layout | None  # the layout of the kept tokens; None: every rank has all of them

    def put_back(self, logits: Tensor, comm: Comm) -> Tensor:
        """Gather logits (1, kept on this rank, V) from all ranks to (B, kept, V)."""
        if logits.shape[1] != self.index.numel():
            logits = logits[:, self.index]
        packed = logits[0] if self.layout is None else self.layout.unshard(logits[0], comm)
        return packed.unflatten(0, (self.rows, -1))


def _prefill_layout(side: Side) -> tuple[Layout, Any]:
    """Return the layout of a prefill, which leaves out padding, and the number of padding tokens on
    the left of each row, (B,).
    """
    documents = side.documents
    by_rows = documents.by_rows().cu_seqlens
    lengths = np.diff(by_rows)
    if not np.array_equal(by_rows, documents.cu_seqlens):
        if not lengths.all():
            where = "in the first call, or with prefill_chunk_size in the first chunk"
            raise ValueError(f"attention_mask must leave each row a token {where}")
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


def _kept_of_prefill(layout: Layout, rank: int, count: int, device: torch.device) -> Kept | None:
    """Return the last `count` tokens of each row, whose logits are returned. If a row has fewer
    tokens, return None, which stands for all tokens.
    """
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


def _to_step(
    model: nn.Module, cache: Cache, kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], Sharding, Kept | None]:
    """Return the arguments of a decoding step as one row, how their tokens are divided among ranks,
    and the tokens whose logits are returned.
    """
    made = dict(kwargs)
    given = [made.get(name) for name in ("input_ids", "inputs_embeds")]
    given = [x for x in given if isinstance(x, Tensor)]
    rows, past = cache.batch_size, cache.get_seq_length()
    x = given[0] if len(given) == 1 else None
    if x is None or x.dim() < 2 or x.shape[0] != rows or not x.shape[1]:
        found = tuple(x.shape) if x is not None else "both" if given else "none"
        wanted = f"({rows}, T), the new tokens of the cache's rows"
        raise ValueError(f"input_ids or inputs_embeds must be {wanted}, got {found}")
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
    documents = BatchDocuments(rows, tokens, np.arange(rows * tokens), cu_seqlens, cu_seqlens)
    index = torch.arange(rows * tokens, device=x.device)
    assert cache.layout is not None
    last = int(positions.max())
    side = DecodingStep(documents, cache.layout, index, made["position_ids"], last)
    if not 0 < count < tokens:
        return made, Sharding(side), None
    last_ones = index.view(rows, tokens)[:, tokens - count :].flatten()
    return made, Sharding(side), Kept(rows, last_ones, None)


def _check_mask(cache: Cache, mask: Any, tokens: int) -> None:
    if mask is None:
        return
    rows, columns = cache.batch_size, cache.get_seq_length() + tokens
    if shape_of(mask) != (rows, columns):
        raise ValueError(f"attention_mask must be ({rows}, {columns}), got {shape_of(mask)}")
    left = torch.zeros(rows) if cache.padding is None else cache.padding
    real = torch.arange(columns, device=mask.device) >= left.to(mask.device)[:, None]
    if not torch.equal(mask.bool(), real):
        raise ValueError("attention_mask must have the same padding as in the prefill")

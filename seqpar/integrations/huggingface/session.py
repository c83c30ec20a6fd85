"""A model of Hugging Face transformers whose sequences are spread over ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from seqpar.comm.agreement import check_on_all_ranks, check_same_weights
from seqpar.comm.averaging import Averaging, own_weights
from seqpar.comm.messages.exchange import Comm, Group
from seqpar.integrations.huggingface.attention.attention import register, session_of, unregister
from seqpar.integrations.huggingface.attention.buckets import add_bucket_hooks
from seqpar.integrations.huggingface.attention.call import ModelCall, current
from seqpar.integrations.huggingface.attention.counting import Counter
from seqpar.integrations.huggingface.attention.linear_layers import FeatureMap, LinearLayer, chosen
from seqpar.integrations.huggingface.attention.multimodal import Beside, take_tokens
from seqpar.integrations.huggingface.attention.own_attention import own, record, set_implementation
from seqpar.integrations.huggingface.attention.positions import add_hooks, takes_positions
from seqpar.integrations.huggingface.attention.recurrent import (
    check_recurrent,
    only_recurrent,
    spread,
)
from seqpar.integrations.huggingface.batch.shard_batch import Cutter, check_all_logits
from seqpar.integrations.huggingface.batch.sharding import KEY, Sharding
from seqpar.integrations.huggingface.compiling import (
    CompiledForward,
    NotCompiled,
    check_compiles,
    check_not_compiled,
)
from seqpar.integrations.huggingface.generate.cache import Cache
from seqpar.integrations.huggingface.generate.generating import Generation
from seqpar.integrations.huggingface.loss.gradients import ModelGradients
from seqpar.integrations.huggingface.loss.losses import losses_of
from seqpar.integrations.huggingface.loss.outputs import mark, unshard
from seqpar.integrations.huggingface.loss.routers import router_faults
from seqpar.integrations.huggingface.model.configs import OwnConfigs, inner_model
from seqpar.integrations.huggingface.model.layers import (
    check_reached,
    encoder_of,
    find_layers,
    groups_of,
    loss_shifts,
    refuse_pickle,
)
from seqpar.integrations.huggingface.report import LayerReport, Report
from seqpar.strategies.lasp2 import LASP2Attention
from seqpar.strategies.registry import make_attention

T = TypeVar("T")
_NOISE = "neftune_noise_alpha"  # of embeddings, and of TrainingArguments
_COPIED = (
    "is a copy of one that is enabled: copy a model before seqpar enables it, or disable() first"
)


class SequenceParallel:
    """A model whose attention runs over the ranks of a group; `enable` makes it.

    Attributes:
        model: what was enabled.
        attention: the strategy's module, which all of its layers call.
        layers: the model's attention layers, by module.
    """

    def __init__(
        self, model: nn.Module, group: Group, strategy: str, layout: str, **options: Any
    ) -> None:
        self.model, self.inner = model, inner_model(model)
        for x in {model, self.inner}:
            check_not_compiled(x)
        self.attention = make_attention(strategy, group, **options)
        self.comm, self.strategy = Comm.of(group), strategy
        self.check_ranks = bool(options.get("check_ranks"))
        self._beside = Beside(self.inner)
        body = self._beside.body
        self.layers = find_layers(body, self._beside.name, router_faults(body, False))
        if any(session_of(x) is not None for x in self.layers):
            raise ValueError("model is enabled already: call disable() first")
        if getattr(self.inner, KEY, None) is not None:
            raise ValueError(f"model {_COPIED}")
        for layer in self.layers.values():
            layer.counter = Counter(layer, self.comm)
        self.records = bool(own(self.layers))
        check_recurrent(self.layers, body)
        self._groups = groups_of(body, self.layers)
        self._shifts = shifts = loss_shifts(self.inner)
        encoder = encoder_of(self.inner)
        with_images = self._beside.text is not None
        self._cutter = Cutter(
            self.inner, self.comm, layout, shifts, encoder is not None, with_images
        )
        if not takes_positions(body) and not only_recurrent(self.layers):
            name = type(body).__name__
            raise ValueError(f"model must take position_ids: {name} counts positions on each rank")
        check_same_weights(self.comm, own_weights(model))
        self._gradients = ModelGradients(model, self.comm, self._blocks())
        self._tokens: list[ModelCall | None] = []
        self._known = set(inspect.signature(self.inner.forward).parameters)
        self._configs = OwnConfigs(model, self._beside.modules)
        register(self)
        setattr(self.inner, KEY, self)  # which copies of the model have too
        set_implementation(body, self.records)
        self._compiled: CompiledForward | None = None
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
            *add_hooks(body, encoder),
            *add_bucket_hooks(body),
            *record(self),
            *spread(self, body),
            *(NotCompiled(x) for x in {model, self.inner}),
        ]
        if with_images:
            hook = take_tokens(self.comm)
            self._handles.append(body.register_forward_pre_hook(hook, with_kwargs=True))
        self.generation = Generation(self, self._cutter, self._groups, self._agree)

    def __deepcopy__(self, memo: object) -> SequenceParallel:
        return self  # the hooks of a copied model are of this session, which refuses its layers

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_pickle()

    def __repr__(self) -> str:
        return f"SequenceParallel({type(self.inner).__name__}, {self.attention!r})"

    def shard(self, batch: Mapping[str, Any], layout: Any = None) -> Any:
        """Return what this rank computes of a batch, which all ranks have whole: see `enable`."""

        def shared() -> dict[str, Any]:
            return self._cutter.shared(batch)

        def cut() -> Any:
            return self._cutter.shard(self._gradients.spread(batch), layout)

        made = self._agree(cut, shared)
        self._cutter.check_tokens(batch)
        return made

    def count_labels(self, batch: Mapping[str, Any]) -> int | None:
        """Return how many labels of a whole batch count in its loss; None if it has none."""
        return self._cutter.count(batch)

    def unshard(self, outputs: Any, batch: Mapping[str, Any] | None = None) -> Any:
        """Return a model's outputs with all ranks' tokens, each in its row and column.

        That is for outputs, and for tensors that are in them as the model returned them; for others
        with this rank's tokens, (1, T_local, …), give the sharded `batch` too. Padding gets 0.
        Each rank sends its rows to all others; backward sums the gradients of all ranks.
        """
        sharding = None if batch is None else batch.get(KEY)
        if batch is not None and sharding is None:
            raise ValueError("batch must be one that shard returned")
        return unshard(outputs, sharding, self.comm)

    def total(self, loss: Tensor) -> Tensor:
        """Return the sum of all ranks' losses (), for a loss that you make of this rank's outputs.

        It is the same number on all ranks, and its backward gives parameters its gradient, as that
        of the model's own loss: divide by what all ranks together count before you call it. All
        ranks call it, and run its backward if one does. Add what is the same on every rank, such as
        a penalty of the weights, to its result. Raise a ValueError if the loss uses parameters
        outside of the model's call.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss must be a tensor (), this rank's part of the loss, got {found}")
        return self._gradients.total(loss.reshape(()))

    def report(self) -> Report:
        """Return what each attention layer has done since the model was enabled."""
        layers = tuple(
            LayerReport(
                x.name,
                x.calls,
                x.forward_bytes,
                x.backward_bytes,
                self.comm.size,
                x.steps,
                x.step_bytes,
            )
            for x in self.layers.values()
        )
        return Report(self.strategy, self.comm.size, layers, self._beside.whole)

    def cache(self, *, block: int = 64, reserve: int = 0) -> Cache:
        """Return an empty cache for calls of the model as `past_key_values`; `generate` makes one.

        With it a call takes and returns whole batches, the same on all ranks: the first one is a
        sharded prefill, whose keys stay on their ranks. It is a cache of transformers' interface,
        and `block` and `reserve` are those of `seqpar.ShardedCache`.
        """
        return self.generation.cache(block, reserve)

    def make_linear(
        self,
        layers: Iterable[int | str],
        *,
        feature_map: FeatureMap | None = None,
        log_decay: Tensor | None = None,
    ) -> None:
        """Compute linear attention in these layers from now on, with the weights that they have.

        They are names or numbers of layers in the report. `feature_map` is applied to q and k, and
        `log_decay` is that of `LASP2Attention`. Ranks then exchange states, whose size does not
        depend on that of the batch. `disable` makes them softmax layers again.
        """
        found = chosen(self.layers, layers)
        attention = LASP2Attention(self.comm, check_ranks=self.check_ranks)
        for layer in found:
            layer.linear = LinearLayer(attention, feature_map, log_decay)

    def compile(self, **options: Any) -> None:
        """Compile the model's forward, with the options of `torch.compile`; `disable` undoes it.

        It is one graph, which serves the next batches, whatever documents they have. The layers
        stay those of the report. A call with a cache, as in `generate`, runs without it. Raise a
        ValueError if the model has more than causal layers of text.
        """
        known = {
            "it is compiled already": self._compiled is not None,
            "it was disabled": not self._handles,
            "it has images or sound beside its text": self._beside.text is not None,
            "its layers compute attention by themselves": self.records,
        }
        check_compiles(self.inner, self._shifts, known)
        self._compiled = CompiledForward(self.inner, options)
        self._handles.append(self._compiled)

    def disable(self) -> None:
        """Give the model its own attention and its own configs back. Again does nothing."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self.generation.remove()
            self._configs.restore()
            delattr(self.inner, KEY)
        self._handles.clear()
        self._gradients.remove()
        unregister(self)

    def _blocks(self) -> list[nn.Module]:
        """Return the modules of lists that have attention layers inside."""
        lists = [x for x in self.model.modules() if isinstance(x, nn.ModuleList)]
        layers = self.layers.keys()
        return [x for blocks in lists for x in blocks if not layers.isdisjoint(x.modules())]

    def faults(self, layer: str | None = None) -> AbstractContextManager[None]:
        """Raise the faults of a call on all ranks, naming the layer, before anything is sent."""
        return nullcontext() if torch.compiler.is_compiling() else self._faults(layer)

    @contextmanager
    def _faults(self, layer: str | None) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError) as fault:
            named = type(fault)(f"{layer}: {fault}" if layer else str(fault))
            self._agree(partial(_raise, named), dict)

    def _agree(self, resolve: Callable[[], T], shared: Callable[[], dict[str, Any]]) -> T:
        """Return `resolve()`; if ranks check their calls, raise its fault on all of them."""
        if not self.check_ranks:
            return resolve()
        return check_on_all_ranks(self.comm.call(), self.strategy, resolve, lambda _: shared())

    def _before(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check a call of the model, and take from its arguments what is not the model's own."""
        check_not_compiled(root)
        if self.generation.takes(kwargs):
            return None
        kwargs = dict(kwargs)
        sharding = kwargs.pop(KEY, None)

        def check() -> Averaging:
            self._check(root, args, kwargs, sharding)
            return Averaging.of(root, self.comm)

        def shared() -> dict[str, Any]:
            digest = sharding.digest() if isinstance(sharding, Sharding) else None
            return {"batch": digest, "keywords": sorted(kwargs), "training": root.training}

        averaging = self._agree(check, shared)
        labels, items = kwargs.pop("labels", None), kwargs.pop("num_items_in_batch", None)
        if "use_cache" in self._known or any(x.recurrence for x in self.layers.values()):
            kwargs["use_cache"] = False
        call = ModelCall(self, sharding, labels, items)
        if self._compiled is not None:
            kwargs["attention_mask"] = self._compiled.masks(call)
        self._gradients.begin_call(averaging, whole=self._compiled is not None)
        self._tokens.append(current.set(call))
        return args, kwargs

    def _check(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], sharding: Any
    ) -> None:
        """Raise a ValueError if the model cannot be called so."""
        if root is not self.model:
            raise ValueError(f"the model {_COPIED}")
        if not isinstance(sharding, Sharding):
            how = "batch = sp.shard(batch); model(**batch)"
            raise ValueError(f"the model must be called with what shard returned: {how}")
        if args:
            raise ValueError("the model must be called with keywords alone, as in model(**batch)")
        check_all_logits(kwargs)
        asked = bool(kwargs.get("output_router_logits"))
        padded = sharding.whole and kwargs.get("attention_mask") is not None
        if reasons := router_faults(self.inner, asked, padded):
            raise ValueError(reasons[0])
        if root.training and getattr(self.inner.get_input_embeddings(), _NOISE, None) is not None:
            reason = "each rank would add noise of another size to its tokens' embeddings"
            raise ValueError(f"{_NOISE} must be None: {reason}")
        if sharding.whole:
            self._beside.check()
        self._cutter.check(kwargs, sharding)

    def _after(self, root: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
        """Add the loss, and what `unshard` needs; this runs after a failure too."""
        call = current.call
        if not self._tokens or call is None or call.session is not self:
            return None
        current.set(self._tokens.pop())
        self._gradients.end_call()
        if outputs is None:
            return None
        check_reached(self._groups, self.layers, call.reached)
        total = self._gradients.total_of_model
        losses = losses_of(self.inner, call, outputs, self.comm, total)
        self._gradients.check_outputs(outputs)
        outputs = self._gradients.watched(outputs)
        if losses:
            outputs = type(outputs)(**{**losses, **outputs, **losses})
        mark(outputs, call.sharding)
        return outputs


def _raise(fault: Exception) -> Any:
    raise fault

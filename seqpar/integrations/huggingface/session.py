"""`enable`, which spreads a transformers model's sequences over ranks, and its session."""

from __future__ import annotations

import copy
import inspect
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.comm.agreement import check_same_model
from seqpar.comm.averaging import Averaging, own_weights
from seqpar.comm.messages.comm import Comm, Group, as_mesh
from seqpar.core.arguments import as_bool, as_int
from seqpar.core.compiling import outside_graphs
from seqpar.core.torch_private import is_compiled, runs_compiled
from seqpar.integrations.huggingface.attention import enabling
from seqpar.integrations.huggingface.attention.attention import FeatureMap, LinearLayer, session_of
from seqpar.integrations.huggingface.attention.call import NAME, EnabledModel, ModelCall, current
from seqpar.integrations.huggingface.attention.compiling import CompiledForward, prepared_masks
from seqpar.integrations.huggingface.attention.counting import track
from seqpar.integrations.huggingface.attention.find_calls import find_calls
from seqpar.integrations.huggingface.attention.multimodal import OutsideText
from seqpar.integrations.huggingface.batch.documents import shape_of
from seqpar.integrations.huggingface.batch.shard_batch import (
    BatchSharder,
    ModelPreparation,
    check_all_logits,
)
from seqpar.integrations.huggingface.batch.sharding import (
    KEY,
    Sharding,
    plain_ids,
    readable,
    scalars_of,
)
from seqpar.integrations.huggingface.generate.cache import Cache
from seqpar.integrations.huggingface.generate.generating import Generation
from seqpar.integrations.huggingface.huggingface_private import attention_of, kept_implementations
from seqpar.integrations.huggingface.loss.gradients import ModelGradients, mark_total
from seqpar.integrations.huggingface.loss.losses import (
    check_loss_function,
    check_loss_terms,
    losses_of,
    router_faults,
)
from seqpar.integrations.huggingface.loss.outputs import (
    check_of_tokens,
    clear_padding,
    mark,
    unshard,
)
from seqpar.integrations.huggingface.loss.row_results import keep_scores, with_row_results
from seqpar.integrations.huggingface.memory.parts import LeanMemory, MemoryReport
from seqpar.integrations.huggingface.model.code import users_of_labels
from seqpar.integrations.huggingface.model.layers import (
    AttentionLayer,
    adapter_faults,
    find_layers,
    layerdrop_faults,
)
from seqpar.integrations.huggingface.model.replaced import Removable, Replaced
from seqpar.integrations.huggingface.token_mixing import TokenMixing
from seqpar.strategies.lasp2 import LASP2Attention
from seqpar.strategies.registry import make_attention

_NOISE = "neftune_noise_alpha"  # attribute of embeddings, and of TrainingArguments
_ONE_BATCH = (
    ". All ranks of a group need one batch: give the sampler the group's number as its rank, or "
    "use huggingface.trainer"
)
_INSTEAD = "call sp.compile(**options) of its session, or compile its blocks one by one"
_IN_GRAPHS = f"seqpar's hooks run outside of graphs: {_INSTEAD}"
_COPIED = (
    "is a copy of one that is enabled: copy a model before seqpar enables it, or disable() first"
)


_outside_graphs = partial(outside_graphs, reason=_IN_GRAPHS)


@dataclass(frozen=True)
class LayerReport:
    """The calls and bytes of one attention layer.

    Attributes:
        calls: the number of times that the layer's forward ran, including recomputation.
        forward_bytes, backward_bytes: the bytes that this rank sent for the layer in forward and in
            backward.
        ranks: the number of ranks that share each sequence.
        steps: the number of calls that were decoding steps.
        step_bytes: the bytes that this rank sent for the layer in decoding steps.
    """

    name: str
    calls: int
    forward_bytes: int
    backward_bytes: int
    ranks: int
    steps: int = 0
    step_bytes: int = 0

    @classmethod
    def of(cls, layer: AttentionLayer, ranks: int) -> LayerReport:
        counted = {x.name: getattr(layer, x.name) for x in fields(cls) if x.name != "ranks"}
        return cls(ranks=ranks, **counted)

    @property
    def bytes(self) -> int:
        """The bytes that this rank sent for the layer, in both passes."""
        return self.forward_bytes + self.backward_bytes


@dataclass(frozen=True)
class Report:
    """Calls and bytes of each attention layer since its model was enabled; str() is a table.

    `whole` lists modules with attention that every rank computes for all tokens, such as a vision
    tower. `memory` lists the bytes that each option of `enable(..., memory=...)` saved in the last
    step.
    """

    strategy: str
    ranks: int
    layers: tuple[LayerReport, ...]
    whole: tuple[str, ...] = ()
    memory: tuple[MemoryReport, ...] = ()

    @property
    def calls(self) -> int:
        """Calls of attention over the ranks, in all layers."""
        return sum(layer.calls for layer in self.layers)

    @property
    def bytes(self) -> int:
        """Bytes that this rank sent for attention, in all layers and both passes."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def steps(self) -> int:
        """The number of calls that were decoding steps, in all layers."""
        return sum(layer.steps for layer in self.layers)

    @property
    def step_bytes(self) -> int:
        """Bytes that this rank sent in decoding steps, in all layers."""
        return sum(layer.step_bytes for layer in self.layers)

    def __str__(self) -> str:
        width = max([len(layer.name) for layer in self.layers], default=0)
        head = f"{self.strategy} over {self.ranks} ranks: {self.calls} calls, {self.bytes:,} bytes"
        if self.steps:
            head += f"; {self.steps} of them decoding steps, {self.step_bytes:,} bytes"
        title = f"{'layer':{width}} {'calls':>8} {'forward':>16} {'backward':>16}"
        rows = [
            f"{x.name:{width}} {x.calls:8} {x.forward_bytes:16,} {x.backward_bytes:16,}"
            for x in self.layers
        ]
        whole = [f"{name}: whole on each rank" for name in self.whole]
        saved = [
            f"memory {x.part}: {x.saved_bytes:,} bytes saved in {x.modules} modules"
            for x in self.memory
        ]
        return "\n".join([head, title, *rows, *whole, *saved])


class SequenceParallel(EnabledModel):
    """A model whose attention runs over the ranks of a group; `enable` makes it.

    Attributes:
        model: the module that was given to `enable`.
        attention: the strategy's module, which all softmax layers call.
        layers: the model's attention layers, by module.
        framework_losses: whether a training framework computes the loss from each rank's outputs
            and combines the gradients of the ranks. If True, `SequenceParallel` does not check
            losses.
    """

    framework_losses = False

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        strategy: str,
        layout: str,
        memory: str | Collection[str] | None = None,
        **options: Any,
    ) -> None:
        self.model = model
        self.inner = inner_model(model)
        for x in {model, self.inner}:
            check_not_compiled(x)
        self.attention = make_attention(strategy, group, **options)
        self.comm = Comm.of(group)
        self.strategy, self._settings = strategy, (group, strategy, layout, options)
        self.check_ranks, self.process = bool(options.get("check_ranks")), os.getpid()
        self._outside = OutsideText(self.inner)
        body = self._outside.body
        faults = router_faults(body, False) + adapter_faults(model, self.inner, False)
        self.layers = find_layers(body, self._outside.name, faults)
        if any(session_of(x) is not None for x in self.layers):
            raise ValueError("model must not be enabled twice: call disable() of its session first")
        if getattr(self.inner, KEY, None) is not None:
            raise ValueError(f"model {_COPIED}")
        for layer in self.layers.values():
            track(layer)
        with_images = self._outside.text is not None
        self._sharder = BatchSharder(self.inner, self.comm, layout, with_images)
        enabling.check_attention(self, body)
        lists = [x for x in model.modules() if isinstance(x, nn.ModuleList)]
        layers = self.layers.keys()
        self.blocks = [{block: layers & set(block.modules()) for block in x} for x in lists]
        self.memory = LeanMemory(self, memory)
        check_same_model(self.comm, own_weights(model), settings_of(self.inner.config))
        changes = self.memory.turn_on()
        self._gradients = ModelGradients(model, self.comm, self.check_ranks)
        self._outer_calls: list[ModelCall | None] = []
        self._label_users = users_of_labels(model, self.inner)
        self._known = set(inspect.signature(self.inner.forward).parameters)
        self._configs = OwnConfigs(model, self._outside.modules)
        # Copies of the model have this attribute too, so their calls can be refused.
        setattr(self.inner, KEY, self)
        self._compiled: CompiledForward | None = None
        self._handles: list[Removable] = [
            *enabling.replace_attention(self, body),
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            self.inner.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._after),
            *(Replaced(x, "compile", self.compile) for x in {model, self.inner}),
            *changes,
        ]
        self._last_hook = model.register_forward_hook(self._end, always_call=True)
        self._handled = id(None)  # id of the exception that the caller of the model is handling
        if self._sharder.for_rows:
            self._handles.append(self.inner.score.register_forward_hook(keep_scores))
        self.mixing = TokenMixing(self, self._outside.modules)
        self.generation = Generation(self, self._sharder)

    def __repr__(self) -> str:
        return f"SequenceParallel({type(self.inner).__name__}, {self.attention!r})"

    def shard(self, batch: Mapping[str, Any], layout: Any = None) -> Any:
        """Return this rank's part of a batch, to be passed to the model as `model(**part)`.

        Every rank passes the same whole batch. Tensors (B, S, …) are cut to (1, T_local, …): the
        tokens that this rank holds, in the layout's order and without the batch's padding. Labels
        are shifted before they are cut. All other values are returned unchanged. If the batch
        contains images or sound, only the labels are cut, because the model needs all of its
        inputs.

        Args:
            batch: the output of a tokenizer or collator, as a mapping.
            layout: a `Layout` of the batch's documents, or a micro-batch of a plan. None stands for
                the batch's own `layout`, if a `Collator` made one, and otherwise for a new layout
                of the kind that was given to `enable`.

        Raises:
            ValueError: if the batch or the layout is wrong, or, with `check_ranks`, differs between
                ranks.
        """
        part = self.agree(
            lambda: self._sharder.shard(self._gradients.of_whole_batch(batch), layout),
            lambda: self._sharder.shared(batch),
            _ONE_BATCH,
        )
        self._sharder.check_tables(batch, part[KEY])
        return part

    def preparation(
        self,
        batch: Mapping[str, Any],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        backward: bool = True,
    ) -> ModelPreparation:
        """Return a function that builds the tables of the model's attention ahead of a step.

        Pass the function to a `Collator`. The workers of a DataLoader then build the tables of each
        row's layout, and a training step only copies the tables to a GPU. The function can be
        pickled. The function is made for this rank only, so each rank must call `preparation`.

        The model runs once on `batch`, without backward and in evaluation mode, to find the number
        of heads, the window and other settings of each attention call. A small batch is enough.
        `report` includes this run. All ranks must call this method before FSDP1 wraps the model.

        Some tables are still built in the step: those of masks that depend on more than documents,
        of chunked attention, and of short convolutions.

        Args:
            batch: a whole batch, as `shard` takes it, the same on all ranks.
            dtype, device: the dtype and device of q, k and v in a step. None stands for the dtype
                and device that the model has now. Pass both arguments if steps use autocast, or if
                a Trainer moves the model later.
            backward: whether steps run backward.

        Raises:
            ValueError: if `shard` or the model refuses the batch, if the model has an encoder, if
                no call can be prepared, or if the strategy chooses its messages in each call.
        """
        self._sharder.preparation(())  # these two lines raise errors before the model runs
        self.attention.preparation(heads=1, head_dim=1, dtype=torch.float32)
        known = {"dtype": dtype, "device": device}
        given = {name: x for name, x in known.items() if x is not None}
        part, backward = self.shard(batch), as_bool("backward", backward)
        calls = find_calls(self, part, backward=backward, **given)
        if not calls:
            raise ValueError("model must have attention whose tables depend only on documents")
        return self._sharder.preparation(calls)

    def count_labels(self, batch: Mapping[str, Any]) -> int | None:
        """Return how many labels of a whole batch count in its loss; None without labels."""
        return self._sharder.count(batch)

    def unshard(self, outputs: Any, batch: Mapping[str, Any] | None = None) -> Any:
        """Return a model's outputs with all ranks' tokens, each in its row and column.

        Tensors that the model returned are recognised. For other tensors (1, T_local, …), pass the
        sharded `batch` too. Padding gets 0. Each rank sends its rows to all other ranks. Backward
        sums the gradients of all ranks.
        """
        sharding = None if batch is None else batch.get(KEY)
        if batch is not None and sharding is None:
            raise ValueError("batch must be a sharded batch, as sp.shard returns it")
        with self.comm.telling_errors():
            return unshard(outputs, sharding, self.comm)

    def total(self, loss: Tensor) -> Tensor:
        """Return the sum of all ranks' losses, for a loss that your code computes from this rank's
        outputs.

        The sum has the same value on all ranks. Call `backward` on the sum. The gradients must then
        be averaged over the ranks, as for the model's own loss, and are the gradient of the sum.
        For a mean, divide the loss by the number of tokens on all ranks before you pass it. All
        ranks must call this method, and if one rank runs backward, all ranks must. If the loss has
        a term that is the same on every rank, such as a penalty of the weights, add this term to
        the returned sum.

        Raises a ValueError if the loss depends on a trainable tensor that is not the model's.
        """
        with self.comm.telling_errors():
            _check_loss(loss, "a tensor (), this rank's part of the loss")
            return self._gradients.total(loss)

    def total_of_whole_batch(self, loss: Tensor) -> Tensor:
        """Return the loss () that every rank has computed from unsharded outputs, for backward.

        The loss must be the same on every rank. In contrast to the loss of `total`, it may contain
        `outputs.aux_loss`.
        """
        with self.comm.telling_errors():
            _check_loss(loss, "a tensor (), the loss of the whole batch")
            return self._gradients.total(loss / self.comm.size, of_whole_batch=True)

    def average_gradients(self) -> None:
        """Average the gradients of the model's parameters over the ranks of the group.

        Call this method on all ranks after backward, before gradients are clipped or unscaled and
        before the optimizer's step. With gradient accumulation, call it once, after the last
        backward. Before this call, each rank has a different gradient, and an optimizer's step
        raises a ValueError. If DDP or FSDP wraps the model, the wrapper averages the gradients, and
        this method does nothing.

        If a parameter has a gradient on some of the ranks only, for example in an expert, all ranks
        get the average, in which a missing gradient counts as 0. Each rank sends 2·(P − 1)/P times
        the bytes of the gradients.

        Raises a ValueError if a gradient was changed after backward, or if the last backward ran in
        DDP's `no_sync`.
        """
        self.agree(self._gradients.check_unchanged, dict)
        with self.comm.telling_errors():
            self._gradients.average()

    def enable_alike(self, model: nn.Module) -> SequenceParallel:
        """Enable another model with the same ranks, strategy and options."""
        group, strategy, layout, options = self._settings
        return SequenceParallel(model, group, strategy, layout, **options)

    def has_attention_of_ranks(self, model: nn.Module) -> bool:
        """Return whether another model's config names seqpar's attention."""
        return attention_of(inner_model(model).config) == NAME

    def report(self) -> Report:
        """Return the calls and bytes of each attention layer since the model was enabled."""
        ranks = self.comm.size
        layers = tuple(LayerReport.of(x, ranks) for x in self.layers.values())
        return Report(self.strategy, ranks, layers, self._outside.whole, self.memory.report())

    def cache(self, *, block: int = 64, reserve: int = 0) -> Cache:
        """Return an empty cache for calls with `past_key_values`; `generate` makes its own.

        In calls with the cache, all ranks pass the same whole batch and get the same whole outputs.
        The first call is the prefill: each rank computes some of the tokens and stores their keys.
        The cache has transformers' interface. `block` and `reserve` are options of
        `seqpar.ShardedCache`.
        """
        return self.generation.cache(block, reserve)

    def make_linear(
        self,
        layers: Iterable[int | str],
        *,
        feature_map: FeatureMap | None = None,
        log_decay: Tensor | None = None,
    ) -> None:
        """Turn softmax layers into linear attention with the same weights.

        Ranks then exchange states, whose size does not depend on the batch. `disable` restores
        softmax attention.

        Args:
            layers: the layers to change, as names or as indices. Names and indices are those of the
                list `report().layers`.
            feature_map: a function applied to q and k.
            log_decay: the option of `LASP2Attention`.
        """
        all_layers = list(self.layers.values())
        softmax_layers = {layer.name: layer for layer in all_layers if layer.recurrence is None}
        chosen = []
        for given in [layers] if isinstance(layers, str | int) else layers:
            name = given
            if not isinstance(given, str):
                name = all_layers[as_int("layers", given, 0, len(all_layers) - 1)].name
            if name not in softmax_layers:
                expected = f"names or numbers of {list(softmax_layers)}"
                raise ValueError(f"layers must be {expected}, got {given!r}")
            chosen.append(softmax_layers[name])
        comm = as_mesh(self.comm, self.comm.size)
        attention = LASP2Attention(comm, check_ranks=self.check_ranks)
        for layer in chosen:
            layer.linear, layer.comm = LinearLayer(attention, feature_map, log_decay), comm

    def compile(self, **options: Any) -> None:
        """Compile the model's forward, with the options of `torch.compile`; `disable` undoes it.

        The model becomes one graph, which is not recompiled for batches with other documents.
        `report` still lists each layer. Calls with a cache, as in `generate`, are not compiled.
        Calls in which seqpar checks your own code are also not compiled. `model.compile(**options)`
        does the same as this method.

        Raises a ValueError if the model has other layers than causal layers of text, or was enabled
        with `memory`.
        """
        self._check_compilable()
        if not self._handles:
            raise ValueError("model cannot be compiled whole: it was disabled")
        self._compiled = CompiledForward(self.inner, options)
        self._handles.append(self._compiled)

    def _check_compilable(self) -> None:
        config, bidirectional = self.inner.config.get_text_config(), "use_bidirectional_attention"
        reasons = {
            f"it has {bidirectional}": getattr(config, bidirectional, None),
            "its masks are not those of causal models": self._sharder.shifts is not True,
            "it is compiled already by sp.compile()": self._compiled is not None,
            "it was enabled with memory": self.memory.is_on,
            "it has images or sound in addition to its text": self._outside.text is not None,
        }
        for reason, holds in reasons.items():
            if holds:
                how = "compile its blocks one by one"
                raise ValueError(f"model cannot be compiled whole: {reason}; {how}")

    def undo_on_disable(self, *changes: Removable) -> None:
        self._handles.extend(changes)

    def disable(self) -> None:
        """Restore the model's own attention and configs. A second call has no effect."""
        for handle in [*self._handles, self._last_hook]:
            handle.remove()
        if self._handles:
            self.generation.remove()
            self._configs.restore()
            delattr(self.inner, KEY)
            self.abandon()
        self._handles.clear()
        self._gradients.remove()
        for module in self.layers:
            vars(module).pop(KEY, None)

    def abandon(self) -> None:
        if (call := current.call) is not None and call.session is self:
            current.set(None)
            if call.cache is not None:
                call.cache.abort()
        self._outer_calls.clear()
        self.mixing.abandon()
        self.generation.outer_calls.clear()

    @_outside_graphs
    def _before(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        compiled = runs_compiled()
        self._handled = id(sys.exception())
        self._last_hook.remove()
        # The hook is registered again in each call, so that it runs after hooks that the user has
        # registered in the meantime.
        self._last_hook = root.register_forward_hook(self._end, always_call=True)
        if _has_cache(kwargs):  # `_enter` begins such a call
            with self.faults():
                if compiled:
                    how = "call the model itself, or use sp.compile()"
                    what = "past_key_values must not be given to a compiled model"
                    raise ValueError(f"{what}: {how}")
            return None
        self.abandon()
        kwargs = readable(kwargs)
        sharding = kwargs.pop(KEY, None)

        def check() -> Averaging:
            self._check(root, args, kwargs, sharding)
            if compiled and self._compiled is None:
                self._check_compilable()
            return Averaging.of(root, self.comm)

        def shared() -> dict[str, Any]:
            digest = sharding.digest() if isinstance(sharding, Sharding) else None
            described = {"batch": digest, "keywords": sorted(kwargs), "training": root.training}
            return described | scalars_of(kwargs)

        averaging = self.agree(check, shared)
        labels = kwargs.pop("labels", None)
        items = kwargs.pop("num_items_in_batch", None)
        if "use_cache" in self._known or any(x.recurrence for x in self.layers.values()):
            kwargs["use_cache"] = False
        call = ModelCall(self, sharding, labels, items)
        if self._compiled is not None or compiled:
            kwargs["attention_mask"] = prepared_masks(call)
        self._gradients.begin_call(averaging)
        self.memory.begin_call()
        self._outer_calls.append(current.set(call))
        self.mixing.begin(call)
        if compiled and self._compiled is None and self.mixing.watches:
            with self.faults():
                what = "model must not be compiled by torch.compile if it has code of your own"
                reason = "seqpar checks this code outside of graphs"
                raise ValueError(f"{what}: {reason}; {_INSTEAD}")
        return args, kwargs

    @_outside_graphs
    def _enter(self, inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin a call that has a cache. For a call without a cache, check that the enabled model
        was called, and not a module inside it.
        """
        args = tuple(map(plain_ids, args))
        kwargs = {name: plain_ids(x) for name, x in kwargs.items()}
        if _has_cache(kwargs):
            return self.generation.begin(inner, args, kwargs)
        running = current.call is not None and current.call.session is self
        if inner is self.inner and not running:
            whole, part = type(self.model).__name__, type(inner).__name__
            merged = "after PEFT's merge_and_unload, call sp.disable() and enable the merged model"
            raise ValueError(
                f"the enabled {whole} must be called, and not the {part} in it: {merged}"
            )
        return args, kwargs

    def _check(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], sharding: Any
    ) -> None:
        if root is not self.model:
            raise ValueError(f"the model {_COPIED}")
        if not isinstance(sharding, Sharding):
            example = "batch = sp.shard(batch); model(**batch)"
            raise ValueError(f"the model must be called with what shard returned: {example}")
        if args:
            raise ValueError("the model must be called with keywords only, as in model(**batch)")
        self.check_not_switched()
        check_all_logits(kwargs)
        if kwargs.get("labels") is not None:
            check_loss_function(self.inner)
            check_loss_terms(self.inner)
            if self._label_users:
                what = f"{self._label_users[0]} uses labels itself, and would get none"
                reason = "seqpar computes the loss after the call"
                how = "pass your own loss to sp.total"
                raise ValueError(f"labels must be None: {what}, because {reason}; {how}")
        if reasons := adapter_faults(root, self.inner, kwargs.get("labels") is not None):
            raise ValueError(reasons[0])
        wants_routers = bool(kwargs.get("output_router_logits"))
        padded = sharding.whole and kwargs.get("attention_mask") is not None
        if reasons := router_faults(self.inner, wants_routers, padded):
            raise ValueError(reasons[0])
        self.memory.check(wants_routers)
        if root.training and getattr(self.inner.get_input_embeddings(), _NOISE, None) is not None:
            reason = (
                "each rank would add a different amount of noise to the embeddings of its tokens"
            )
            raise ValueError(f"{_NOISE} must be None: {reason}")
        if reasons := layerdrop_faults(self._outside.body):
            raise ValueError(f"layerdrop must be 0 in training: {reasons[0]}")
        if sharding.whole:
            self._outside.check()
        self._sharder.check(kwargs, sharding)
        self._check_items(kwargs, sharding)

    def _check_items(self, kwargs: dict[str, Any], sharding: Sharding) -> None:
        labels, items = kwargs.get("labels"), kwargs.get("num_items_in_batch")
        if sharding.last_tokens is not None:
            return  # all ranks have the labels of all rows, so there is nothing to count
        if labels is None or items is None or (isinstance(items, Tensor) and not items.is_cpu):
            return  # reading the number from a GPU would wait for the GPU
        if int(items) in (1, sharding.labels):
            return
        if self.comm.size > 1 and int(items) == int((labels != -100).sum()):
            found = f"{int(items)}, the labels of this rank's part"
            how = f"count whole batches by sp.count_labels: this batch has {sharding.labels}"
            raise ValueError(f"num_items_in_batch must be of all ranks, got {found}; {how}")

    @_outside_graphs
    def _after(self, root: nn.Module, args: Any, outputs: Any) -> Any:
        """Add the loss to the outputs, and note on each output to which tokens its rows belong."""
        call = current.call
        if not self._outer_calls or call is None or call.session is not self:
            return None
        try:
            self.mixing.end()
        finally:
            current.set(self._outer_calls.pop())
        return self._finished(call, outputs)

    @_outside_graphs
    def _end(self, root: nn.Module, args: Any, outputs: Any) -> None:
        """End a call if the model or a hook raised an error, and raise an error on all other
        ranks.
        """
        error = sys.exception()
        if error is None or id(error) == self._handled or self.silent:
            return
        self.mixing.abandon()
        if self._outer_calls:
            current.set(self._outer_calls.pop())
        self.comm.tell_error(error)

    def _finished(self, call: ModelCall, outputs: Any) -> Any:
        call.check_reached()
        total = self._gradients.total_of_model
        outputs = with_row_results(call, outputs, self.comm)
        is_chunked = call.chunked_loss is not None
        losses = losses_of(self.inner, call, outputs, self.comm, total, self.memory.loss)
        if is_chunked:  # the logits are only a probe
            outputs = type(outputs)(**{name: x for name, x in outputs.items() if name != "logits"})
        mark(outputs, call.sharding)
        check_of_tokens(outputs)
        outputs = clear_padding(outputs)
        if not self.framework_losses:
            outputs = self._gradients.watched(outputs)
        if losses:
            for loss in losses.values():
                mark_total(loss)
            # The losses come first among the outputs, as in transformers, and replace the model's
            # losses.
            outputs = type(outputs)(**{**losses, **outputs, **losses})
        mark(outputs, call.sharding)
        return outputs


def enable(
    model: nn.Module,
    group_or_mesh: Group,
    strategy: str = "ring",
    *,
    layout: str = "zigzag",
    check_ranks: bool = True,
    memory: str | Collection[str] | None = None,
    **options: Any,
) -> SequenceParallel:
    """Spread the sequences of a transformers model over the ranks of a group.

    Afterwards, every rank passes the same batch to `sp.shard`, and calls the model with the
    returned part. Attention then covers the keys of all ranks. All other layers compute only this
    rank's tokens.

    Install transformers 5 by `pip install 'seqpar[hf]'`, and TRL by `pip install 'seqpar[trl]'`. To
    train with transformers' `Trainer` or `Seq2SeqTrainer`, or with a trainer of TRL, see
    `seqpar.integrations.huggingface.trainer`.

    Args:
        model: a `PreTrainedModel`, or a module that contains one, such as DDP's or PEFT's. Wrap it
            in PEFT before `enable`, and in DDP or FSDP before or after.
        group_or_mesh: the ranks that share each sequence. A process group, or for "mesh" and "usp"
            a 2-D DeviceMesh.
        strategy: as in `seqpar.make_attention`. "auto" needs `pip install 'seqpar[plan]'`. If the
            option `cluster` is not given, "auto" first measures rank 0's machine, for up to
            `measure_seconds`.
        layout: the kind of layouts that `shard` makes: "zigzag", "striped" or "contiguous".
        check_ranks: whether ranks compare each call before they send tensors. If one rank raises an
            error, all ranks then raise it.
        memory: ways to reduce memory: a list of the names below, or "lean" for all of them that the
            model supports. Results and gradients are equal to those without `memory`, up to
            rounding.

            * "loss": calls with labels compute the loss by `seqpar.memory.chunked_cross_entropy`,
              and return no logits;
            * "tiles": MLPs, experts and norms compute 4,096 tokens at a time, by
              `seqpar.memory.tiled`;
            * "checkpoints": in training mode, `seqpar.checkpoint` recomputes each block;
            * "offload", with "checkpoints": `seqpar.offload` keeps the inputs of these blocks, and
              the out and lse of their attention, in host memory.
        options: the strategy's options.

    Returns:
        sp: a session with the methods `sp.shard(batch)`, `sp.unshard(outputs)`, `sp.report()` and
            `sp.disable()`.

        If the batch has labels, the outputs contain the mean loss of all labels, which is the same
        number on all ranks. After `loss.backward()`, the gradients must be averaged over the ranks.
        DDP or FSDP does this if it wraps all trainable parameters and its ranks include the group.
        Otherwise, call `sp.average_gradients()` before the optimizer's step. If you compute the
        loss yourself, pass it through `sp.total`.

    Raises:
        ValueError: if a layer cannot be computed exactly on a part of the tokens (the message names
            the layer and the reason), if a weight differs between ranks (the message names the
            weight), or if a part of `memory` would not be exact for the model.
        TypeError: if the strategy does not have one of the options.
        ImportError: if transformers is not installed. For "auto", also if simpy is not installed.
    """
    if layout not in ("zigzag", "striped", "contiguous"):
        raise ValueError(f"layout must be zigzag, striped or contiguous, got {layout!r}")
    return SequenceParallel(
        model, group_or_mesh, strategy, layout, memory, check_ranks=check_ranks, **options
    )


def check_not_compiled(model: nn.Module) -> None:
    if is_compiled(model):
        how = "enable the model first, and compile it then"
        raise ValueError(f"model must not be compiled before it is enabled: {how}")


def _check_loss(loss: object, expected: str) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(f"loss must be {expected}, got {shape_of(loss)}")


def _has_cache(kwargs: Mapping[str, Any]) -> bool:
    return isinstance(kwargs.get("past_key_values"), Cache)


def settings_of(config: Any) -> dict[str, Any]:
    """Return a model's settings that must be equal on all ranks, by the names that users know.

    Paths can differ between ranks. Settings whose names begin with an underscore can also differ,
    because they belong to seqpar and to transformers itself.
    """
    named = _public(config.to_dict())
    return {f"model.config.{name}": x for name, x in named.items()}


def _public(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        str(name): _public(x) if isinstance(x, dict) else x
        for name, x in settings.items()
        if str(name)[0] != "_" and name != "transformers_version"
    }


class OwnConfigs:
    """Copies of a model's configs, which replace them because several models can share a config.

    Modules in `apart` get separate copies.
    """

    def __init__(self, model: nn.Module, apart: Collection[nn.Module]) -> None:
        from transformers import PreTrainedConfig

        memos: dict[bool, dict[int, Any]] = {True: {}, False: {}}
        self._replaced: list[tuple[nn.Module, str, Any, Any]] = []
        for x in model.modules():
            for name, config in list(vars(x).items()):
                if isinstance(config, PreTrainedConfig):
                    own = copy.deepcopy(config, memos[x in apart])
                    self._replaced.append((x, name, config, own))
                    setattr(x, name, own)

    def restore(self) -> None:
        """Put the original configs back, and apply the changes that were made to the copies."""
        from transformers import PreTrainedConfig

        for x, name, config, own in self._replaced:
            if getattr(x, name) is own:
                setattr(x, name, config)
            implementations = kept_implementations(own)
            for key, value in vars(own).items():
                changed = not isinstance(value, PreTrainedConfig) and key not in implementations
                if changed and vars(config).get(key) != value:
                    setattr(config, key, value)


def require(package: str, user: str) -> None:
    """Raise an ImportError with pip's command if a package of the extra `hf` is missing."""
    try:
        import_module(package)
    except ImportError as error:
        command = "pip install 'seqpar[hf]'"
        raise ImportError(f"{user} needs {error.name or package}: {command}") from error


def inner_model(model: nn.Module) -> Any:
    require("transformers", "seqpar.integrations.huggingface")
    from transformers import PreTrainedModel

    if isinstance(model, nn.Module):
        for x in model.modules():
            if isinstance(x, PreTrainedModel):
                return x
    found = type(model).__name__
    raise ValueError(f"model must be or contain a transformers.PreTrainedModel, got {found}")

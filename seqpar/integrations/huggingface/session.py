"""A transformers model whose sequences are spread over ranks, and `enable`, which makes it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.comm.agreement import check_same_weights
from seqpar.comm.averaging import Averaging, own_weights
from seqpar.comm.messages.exchange import Comm, Group, as_mesh
from seqpar.core.arguments import as_bool, as_int
from seqpar.integrations.huggingface.attention import compiling, enabling
from seqpar.integrations.huggingface.attention.attention import FeatureMap, LinearLayer, session_of
from seqpar.integrations.huggingface.attention.call import EnabledModel, ModelCall, current
from seqpar.integrations.huggingface.attention.counting import track
from seqpar.integrations.huggingface.attention.find_calls import find_calls
from seqpar.integrations.huggingface.attention.multimodal import OutsideText
from seqpar.integrations.huggingface.batch.collator import ModelPreparation
from seqpar.integrations.huggingface.batch.documents import shape_of
from seqpar.integrations.huggingface.batch.shard_batch import BatchSharder, check_all_logits
from seqpar.integrations.huggingface.batch.sharding import KEY, Sharding
from seqpar.integrations.huggingface.generate.cache import Cache
from seqpar.integrations.huggingface.generate.generating import Generation
from seqpar.integrations.huggingface.loss.gradients import ModelGradients
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
from seqpar.integrations.huggingface.model.code import computes_itself
from seqpar.integrations.huggingface.model.layers import (
    AttentionLayer,
    adapter_faults,
    find_layers,
    layerdrop_faults,
)
from seqpar.integrations.huggingface.model.patched_globals import Removable, Replaced
from seqpar.strategies.lasp2 import LASP2Attention
from seqpar.strategies.registry import make_attention

_NOISE = "neftune_noise_alpha"  # attribute of embeddings, and of TrainingArguments
_COPIED = (
    "is a copy of one that is enabled: copy a model before seqpar enables it, or disable() first"
)


@dataclass(frozen=True)
class LayerReport:
    """The calls and bytes of one attention layer.

    Attributes:
        calls: how often the layer's forward ran, recomputation included.
        forward_bytes, backward_bytes: bytes that this rank sent for the layer in each pass.
        ranks: the number of ranks that share each sequence.
        steps: how many of the calls were decoding steps, after a prefill.
        step_bytes: the forward bytes of these steps.
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
        """Bytes that this rank sent for the layer, in both passes."""
        return self.forward_bytes + self.backward_bytes


@dataclass(frozen=True)
class Report:
    """Calls and bytes of each attention layer since its model was enabled; str() is a table.

    `whole` names modules with attention, such as a vision tower, that every rank computes whole.
    """

    strategy: str
    ranks: int
    layers: tuple[LayerReport, ...]
    whole: tuple[str, ...] = ()

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
        """How many of the calls were decoding steps, in all layers."""
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
        return "\n".join([head, title, *rows, *whole])


class SequenceParallel(EnabledModel):
    """A model whose attention runs over the ranks of a group; `enable` makes it.

    Attributes:
        model: the module that was given to `enable`.
        attention: the strategy's module, which all softmax layers call.
        layers: the model's attention layers, by module.
    """

    def __init__(
        self, model: nn.Module, group: Group, strategy: str, layout: str, **options: Any
    ) -> None:
        self.model = model
        self.inner = inner_model(model)
        for x in {model, self.inner}:
            compiling.check_not_compiled(x)
        self.attention = make_attention(strategy, group, **options)
        self.comm = Comm.of(group)
        self.strategy = strategy
        self.check_ranks = bool(options.get("check_ranks"))
        self._outside = OutsideText(self.inner)
        body = self._outside.body
        faults = router_faults(body, False) + adapter_faults(model, self.inner, False)
        self.layers = find_layers(body, self._outside.name, faults)
        if any(session_of(x) is not None for x in self.layers):
            raise ValueError("model is enabled already: call disable() first")
        if getattr(self.inner, KEY, None) is not None:
            raise ValueError(f"model {_COPIED}")
        for layer in self.layers.values():
            track(layer)
        self.traces = any(computes_itself(type(x)) for x in self.layers)
        with_images = self._outside.text is not None
        self._sharder = BatchSharder(self.inner, self.comm, layout, with_images)
        enabling.check_attention(self, body)
        check_same_weights(self.comm, own_weights(model))
        lists = [x for x in model.modules() if isinstance(x, nn.ModuleList)]
        layers = self.layers.keys()
        self.blocks = [{block: layers & set(block.modules()) for block in x} for x in lists]
        blocks = [block for x in self.blocks for block, inside in x.items() if inside]
        self._gradients = ModelGradients(model, self.comm, blocks, self.check_ranks)
        self._outer_calls: list[ModelCall | None] = []
        self._known = set(inspect.signature(self.inner.forward).parameters)
        self._configs = OwnConfigs(model, self._outside.modules)
        setattr(self.inner, KEY, self)  # copies of the model have it too, and are refused by it
        self._compiled: compiling.CompiledForward | None = None
        self._handles: list[Removable] = [
            *enabling.replace_attention(self, body),
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
            *(Replaced(x, "compile", compiling.refuse_compile) for x in {model, self.inner}),
        ]
        self.generation = Generation(self, self._sharder)

    def __repr__(self) -> str:
        return f"SequenceParallel({type(self.inner).__name__}, {self.attention!r})"

    def shard(self, batch: Mapping[str, Any], layout: Any = None) -> Any:
        """Return this rank's part of a batch that all ranks have whole, for `model(**part)`.

        Tensors (B, S, …) become (1, T_local, …), the tokens that this rank holds, in the layout's
        order and without padding. Labels are shifted first, and everything else is passed on
        unchanged. If a batch has images or sound, the model's own inputs stay whole, except labels.

        Args:
            batch: the output of a tokenizer or collator, as a mapping.
            layout: a `Layout` of the batch's documents, or a micro-batch of a plan; None: the
                batch's `layout`, if a `Collator` made one, or one of the kind that was given to
                `enable`.

        Raises:
            ValueError: if the batch or the layout is wrong, or, with `check_ranks`, differs between
                ranks.
        """
        enabling.guard_models()  # again, because the compiler may be loaded meanwhile
        part = self.agree(
            lambda: self._sharder.shard(self._gradients.spread(batch), layout),
            lambda: self._sharder.shared(batch),
        )
        self._sharder.check_tokens(batch)
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

        Pass it to a `Collator`. A DataLoader's workers then build the tables of each row's layout,
        and the step only copies them to a GPU. The function can be pickled. Each rank needs its
        own.

        The model runs once on `batch`, forward only and in evaluation mode, to find the kinds of
        its attention calls: heads, windows and so on. A small batch is enough. The report counts
        this run too. All ranks must call this method, before FSDP1 wraps the model.

        A step still builds the tables of ALiBi, of masks that depend on more than documents, of
        chunked attention, and of short convolutions.

        Args:
            batch: a whole batch, as `shard` takes it, the same on all ranks.
            dtype, device: the dtype and device of q, k and v in a step. Default: the model's
                current ones. Pass them if steps use autocast or a Trainer moves the model later.
            backward: whether steps have a backward.

        Raises:
            ValueError: if `shard` or the model refuses the batch, if the model has an encoder, if
                no call can be prepared, or if the strategy chooses its messages in each call.
        """
        self._sharder.preparation(())  # before the model runs, like the next line
        self.attention.preparation(heads=1, head_dim=1, dtype=torch.float32)
        known = {"dtype": dtype, "device": device}
        given = {name: x for name, x in known.items() if x is not None}
        part, backward = self.shard(batch), as_bool("backward", backward)
        calls = find_calls(self, part, backward=backward, **given)
        if not calls:
            raise ValueError("model must have attention whose tables depend only on documents")
        return self._sharder.preparation(calls)

    def count_labels(self, batch: Mapping[str, Any]) -> int | None:
        """Return how many labels of a whole batch count in its loss; None if it has no labels."""
        return self._sharder.count(batch)

    def unshard(self, outputs: Any, batch: Mapping[str, Any] | None = None) -> Any:
        """Return a model's outputs with all ranks' tokens, each in its row and column.

        Tensors that the model returned are recognised. For other tensors of this rank's tokens,
        (1, T_local, …), give the sharded `batch` too. Padding gets 0. Each rank sends its rows to
        all others; backward sums the gradients of all ranks.
        """
        sharding = None if batch is None else batch.get(KEY)
        if batch is not None and sharding is None:
            raise ValueError("batch must be one that shard returned")
        return unshard(outputs, sharding, self.comm)

    def total(self, loss: Tensor) -> Tensor:
        """Return the sum of all ranks' losses (), for your own loss of this rank's outputs.

        The sum is the same on all ranks, and its backward gives each parameter the sum's gradient,
        as the model's own loss does. Divide by the count of all ranks before you call it. All ranks
        must call it, and run its backward if one does. Add terms that are the same on every rank,
        such as a penalty of the weights, to the result.

        Raises a ValueError if the loss uses parameters outside of the model's call.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            expected = "a tensor (), this rank's part of the loss"
            raise ValueError(f"loss must be {expected}, got {shape_of(loss)}")
        return self._gradients.total(loss.reshape(()))

    def report(self) -> Report:
        """Return the calls and bytes of each attention layer since the model was enabled."""
        ranks = self.comm.size
        layers = tuple(LayerReport.of(x, ranks) for x in self.layers.values())
        return Report(self.strategy, ranks, layers, self._outside.whole)

    def cache(self, *, block: int = 64, reserve: int = 0) -> Cache:
        """Return an empty cache for calls with `past_key_values`; `generate` makes its own.

        Calls with the cache take and return whole batches, the same on all ranks. The first call is
        a sharded prefill, whose keys stay on their ranks. The cache has transformers' interface;
        `block` and `reserve` are the options of `seqpar.ShardedCache`.
        """
        return self.generation.cache(block, reserve)

    def make_linear(
        self,
        layers: Iterable[int | str],
        *,
        feature_map: FeatureMap | None = None,
        log_decay: Tensor | None = None,
    ) -> None:
        """Turn softmax layers into linear attention, with the weights that they have.

        Ranks then exchange states, whose size does not depend on the batch. `disable` turns the
        layers back.

        Args:
            layers: names of layers, or their numbers in the report's order.
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

        The result is one graph, which also serves later batches with other documents. The report
        still lists each layer. Calls with a cache, as in `generate`, are not compiled.

        Raises a ValueError if the model has other layers than causal layers of text.
        """
        config, bidirectional = self.inner.config.get_text_config(), "use_bidirectional_attention"
        reasons = {
            f"it has {bidirectional}": getattr(config, bidirectional, None),
            "its masks are not those of causal models": self._sharder.shifts is not True,
            "it is compiled already": self._compiled is not None,
            "it was disabled": not self._handles,
            "it has images or sound in addition to its text": self._outside.text is not None,
            "its layers compute attention themselves": self.traces,
        }
        for reason, holds in reasons.items():
            if holds:
                raise ValueError(f"model cannot be compiled whole: {reason}")
        self._compiled = compiling.CompiledForward(self.inner, options)
        self._handles.append(self._compiled)

    def disable(self) -> None:
        """Restore the model's own attention and configs. A second call has no effect."""
        for handle in self._handles:
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
        self.generation.abandon()
        self._gradients.end_call()

    def _before(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        compiling.check_not_compiled(root)
        if self.generation.takes(kwargs):
            return None
        self.abandon()
        kwargs = dict(kwargs)
        sharding = kwargs.pop(KEY, None)

        def check() -> Averaging:
            self._check(root, args, kwargs, sharding)
            return Averaging.of(root, self.comm)

        def shared() -> dict[str, Any]:
            digest = sharding.digest() if isinstance(sharding, Sharding) else None
            return {"batch": digest, "keywords": sorted(kwargs), "training": root.training}

        averaging = self.agree(check, shared)
        labels = kwargs.pop("labels", None)
        items = kwargs.pop("num_items_in_batch", None)
        if "use_cache" in self._known or any(x.recurrence for x in self.layers.values()):
            kwargs["use_cache"] = False
        call = ModelCall(self, sharding, labels, items)
        if self._compiled is not None:
            kwargs["attention_mask"] = self._compiled.masks(call)
        self._gradients.begin_call(averaging, whole=self._compiled is not None)
        self._outer_calls.append(current.set(call))
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
        check_all_logits(kwargs)
        if kwargs.get("labels") is not None:
            check_loss_function(self.inner)
            check_loss_terms(self.inner)
            if reasons := adapter_faults(root, self.inner, True):
                raise ValueError(f"labels must be None: {reasons[0]}")
        wants_routers = bool(kwargs.get("output_router_logits"))
        padded = sharding.whole and kwargs.get("attention_mask") is not None
        if reasons := router_faults(self.inner, wants_routers, padded):
            raise ValueError(reasons[0])
        if root.training and getattr(self.inner.get_input_embeddings(), _NOISE, None) is not None:
            reason = "each rank would add noise of another size to its tokens' embeddings"
            raise ValueError(f"{_NOISE} must be None: {reason}")
        if reasons := layerdrop_faults(self._outside.body):
            raise ValueError(f"layerdrop must be 0 in training: {reasons[0]}")
        if sharding.whole:
            self._outside.check()
        self._sharder.check(kwargs, sharding)

    def _after(self, root: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
        """Add the loss to the outputs, and mark them for `unshard`. Runs after a failure too."""
        call = current.call
        if not self._outer_calls or call is None or call.session is not self:
            return None
        current.set(self._outer_calls.pop())
        self._gradients.end_call()
        if outputs is None:
            return None
        call.check_reached()
        total = self._gradients.total_of_model
        losses = losses_of(self.inner, call, outputs, self.comm, total)
        self._gradients.check_outputs(outputs)
        mark(outputs, call.sharding)
        check_of_tokens(outputs)
        outputs = self._gradients.watched(clear_padding(outputs))
        if losses:
            # The losses are first, and replace the model's own.
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
    **options: Any,
) -> SequenceParallel:
    """Spread the sequences of a transformers model over the ranks of a group.

    Afterwards every rank gives the same batch to `sp.shard`, and calls the model with the result.
    Attention then covers the keys of all ranks; all other layers compute a rank's own tokens.

    It needs transformers 5: `pip install 'seqpar[hf]'`, and with TRL also `'seqpar[trl]'`. To train
    with transformers' `Trainer` or `Seq2SeqTrainer`, or with TRL's `SFTTrainer`, see
    `seqpar.integrations.huggingface.trainer`.

    Args:
        model: a `PreTrainedModel`, or a module that contains one, such as DDP's or PEFT's. Wrap it
            in PEFT before `enable`, and in DDP or FSDP before or after.
        group_or_mesh: the argument of the strategy: a process group, or for "mesh" and "usp" a 2-D
            DeviceMesh.
        strategy: as in `seqpar.make_attention`. "auto" needs `'seqpar[plan]'`, and without the
            option `cluster` rank 0 first measures its machine, for up to `measure_seconds`.
        layout: the kind of layouts that `shard` makes: "zigzag", "striped" or "contiguous".
        check_ranks: compare calls over the ranks first, so that all ranks raise the error of one.
        options: the strategy's options.

    Returns:
        sp: with `sp.shard(batch)`, `sp.unshard(outputs)`, `sp.report()` and `sp.disable()`. If the
        batch has labels, the outputs have the mean loss of all its labels, the same number on all
        ranks, and after `loss.backward()` every rank has that loss's gradients. DDP or FSDP average
        gradients of the parameters that they manage; they must average over ranks that include the
        group. seqpar sums all other gradients over the group, before their hooks run. Each call of
        the model finds out which case applies. Your own loss must come from `sp.total`.

    Raises:
        ValueError: if a layer cannot be computed exactly on a part of the tokens; the message names
            the layer and the reason. Also if the model's weights differ between ranks; the message
            names the first one.
        TypeError: if the strategy does not have an option.
        ImportError: if transformers is not installed, or for "auto" simpy.
    """
    if layout not in ("zigzag", "striped", "contiguous"):
        raise ValueError(f"layout must be zigzag, striped or contiguous, got {layout!r}")
    return SequenceParallel(
        model, group_or_mesh, strategy, layout, check_ranks=check_ranks, **options
    )


class OwnConfigs:
    """Copies that replace configs, which models may share; modules in `apart` have other copies."""

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
        """Put the original configs back, and carry over changes that were made in the copies."""
        from transformers import PreTrainedConfig

        for x, name, config, own in self._replaced:
            if getattr(x, name) is own:
                setattr(x, name, config)
            for key, value in vars(own).items():
                changed = not isinstance(value, PreTrainedConfig) and "_implementation" not in key
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
    raise ValueError(f"model must be or have a transformers.PreTrainedModel, got {found}")

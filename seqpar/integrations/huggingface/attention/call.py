"""An enabled model, one of its calls while it runs, and the masks that its layers receive."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor, nn

from seqpar.comm.agreement import check_on_all_ranks
from seqpar.comm.messages.comm import Comm
from seqpar.core.compiling import is_traced
from seqpar.integrations.huggingface.attention.masks import MaskShape
from seqpar.integrations.huggingface.batch.sharding import Opaque, Sharding, Side
from seqpar.integrations.huggingface.huggingface_private import attention_of
from seqpar.integrations.huggingface.model.layers import AttentionLayer, Uncopied
from seqpar.softmax.module import Attention

_IN_MAIN = "call sp.shard with the batches that the loader returns"
_OWN_MASK = "the model's layers must not make their own mask, but a layer"
NAME = "seqpar"  # the name of the attention implementation in configs
T = TypeVar("T")


class EnabledModel(Uncopied):
    """An enabled model: the state that its attention layers and `generate` use."""

    model: nn.Module  # the module that was given to `enable`
    inner: Any  # the outermost transformers model
    comm: Comm  # the ranks that share each sequence
    strategy: str
    check_ranks: bool
    process: int  # the id of the process that enabled the model
    attention: Attention  # the strategy's module, which all softmax layers call
    layers: dict[nn.Module, AttentionLayer]  # the model's attention layers, by module
    blocks: list[dict[nn.Module, set[nn.Module]]]  # per ModuleList, the layers inside each block
    configs: list[Any]  # the model's configs that name seqpar's attention
    mixing: Any  # the session's `TokenMixing`
    silent: bool = False  # whether code runs that only this rank may run, without messages

    def abandon(self) -> None:
        """End calls that did not finish, for example after Ctrl-C."""
        raise NotImplementedError

    def check_not_switched(self) -> None:
        for config in self.configs:
            if (name := attention_of(config)) != NAME:
                found = f"it was set to {name!r} after enable"
                reason = "layers would attend to one rank's keys only"
                how = f"call model.set_attn_implementation('{NAME}')"
                raise ValueError(
                    f"the model's attention must be seqpar's: {found}, and {reason}; {how}, or "
                    "sp.disable() before you set a different one"
                )

    def faults(self, layer: str | None = None) -> AbstractContextManager[None]:
        """If one rank raises a ValueError or TypeError in this context, raise the same error on all
        ranks.

        The context must end before a rank sends the first message of a call. The text of the error
        begins with `layer`.
        """
        return nullcontext() if is_traced() else self._faults(layer)

    @contextmanager
    def _faults(self, layer: str | None) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError) as fault:
            named = type(fault)(f"{layer}: {fault}" if layer else str(fault))
            self.agree(partial(_raise, named), dict)

    def agree(
        self, resolve: Callable[[], T], shared: Callable[[], dict[str, Any]], hint: str = ""
    ) -> T:
        """Return the result of `resolve()`. If `resolve` raises an error on one rank, all ranks
        raise this error.

        All ranks also raise an error if `shared()` differs between ranks. `hint` is appended to
        this error.
        """
        if self.silent:
            return resolve()
        if os.getpid() != self.process:  # a forked process cannot send messages
            where = "in the process that enabled the model, not in a DataLoader's worker"
            raise ValueError(f"shard, generate and the model must be called {where}: {_IN_MAIN}")
        with self.comm.telling_errors():
            if not self.check_ranks:
                return resolve()
            call, described = self.comm.call(), lambda _: shared()
            return check_on_all_ranks(call, self.strategy, resolve, described, hint)


def _raise(fault: Exception) -> NoReturn:
    raise fault


@dataclass(eq=False)
class ModelCall:
    """A call of an enabled model, kept until its backward has run."""

    session: EnabledModel
    sharding: Sharding
    labels: Tensor | None = None  # this rank's labels, if the batch has any
    items: int | Tensor | None = None  # the divisor of the loss, if the caller gave one
    counted: dict[nn.Module, int] = field(init=False)  # calls of each layer before this call
    entered: bool = False  # whether the text model of an image model has been called
    prepared: ShardedMask | None = None  # the mask that the outer model made for the text model
    cache: Any = None  # the `Cache` of a call with `past_key_values`
    scores: Tensor | None = None  # (1, T_local, labels), if the model's head answers for rows
    router_logits: Any = None  # (T_local, experts) of each layer, if the outputs do not have them
    chunked_loss: Tensor | None = None  # the sum of losses (), if the head computed it in chunks
    joined: bool = True  # whether the outputs of a call with a cache are gathered from all ranks

    def __post_init__(self) -> None:
        self.counted = {x: layer.calls for x, layer in self.session.layers.items()}

    def check_reached(self) -> None:
        """Raise an error if no attention layer was called during a call of the model, or if only
        some blocks of a list of blocks were called.
        """
        layers = self.session.layers
        reached = {x for x, layer in layers.items() if layer.calls > self.counted[x]}
        reason = "other code replaced their forwards, or skipped them; undo that, or sp.disable()"
        if not reached:
            raise ValueError(f"0 of {len(layers)} attention layers were reached: {reason}")
        for blocks in self.session.blocks:
            missed = [x for x in blocks.values() if x and not x & reached]
            if missed and any(x & reached for x in blocks.values()):
                names = ", ".join(layers[x].name for inside in missed for x in inside)
                raise ValueError(f"the attention layers {names} were not reached: {reason}")

    @property
    def decodes(self) -> bool:
        """Whether this call is a decoding step."""
        return self.cache is not None and self.cache.decodes

    def side(self, in_encoder: bool) -> Side:
        side = self.sharding.encoder if in_encoder else self.sharding.main
        assert side is not None
        return side


class _NoTensor(ValueError, AttributeError):
    """Raised for attributes that only tensors have. It is an AttributeError, so `hasattr` returns
    False.
    """


class ShardedMask(Opaque):
    """The mask that layers receive. The mask refers to the call of the model, so that a layer can
    find the call when backward recomputes the layer.
    """

    def __init__(self, call: ModelCall, pattern: MaskShape) -> None:
        self.call, self.pattern = call, pattern

    def to(self, *args: Any, **kwargs: Any) -> Self:
        if any(isinstance(x, torch.dtype | Tensor) for x in (*args, *kwargs.values())):
            raise _NoTensor(f"{_OWN_MASK} casts the mask")
        return self

    def __getattr__(self, name: str) -> Any:
        if hasattr(Tensor, name):
            raise _NoTensor(f"{_OWN_MASK} reads the mask's {name}")
        raise AttributeError(name)

    def __getitem__(self, index: Any) -> ShardedMask:
        if all(map(_keeps_all, index if isinstance(index, tuple) else (index,))):
            return self
        raise ValueError(f"{_OWN_MASK} cuts the mask")


def _keeps_all(index: Any) -> bool:
    return isinstance(index, slice) and not index.start and index.stop is index.step is None


class PreparedMask(ShardedMask):
    """The mask of all layers of a compiled model."""

    ndim = 0
    shape = (0,)


class _CurrentCall(threading.local):
    """The call of the model that runs in this thread."""

    call: ModelCall | None = None

    def set(self, call: ModelCall | None) -> ModelCall | None:
        previous, self.call = self.call, call
        return previous


current = _CurrentCall()

"""A call of an enabled model while it runs, and the masks that its layers are given."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from seqpar.comm.messages.exchange import Comm
from seqpar.integrations.huggingface.attention.buckets import Masks
from seqpar.integrations.huggingface.attention.masks import MaskShape
from seqpar.integrations.huggingface.batch.sharding import Sharding, Side
from seqpar.integrations.huggingface.model.layers import AttentionLayer
from seqpar.softmax.module import Attention


class Session(Protocol):
    """What attention needs to know of an enabled model."""

    comm: Comm
    attention: Attention
    layers: dict[nn.Module, AttentionLayer]
    records: bool  # whether layers compute attention by themselves

    def faults(self, layer: str | None = None) -> AbstractContextManager[None]:
        """Raise faults on all ranks."""
        ...


@dataclass(eq=False)
class ModelCall:
    """A call of a model, while it runs and until its backward has run.

    `labels` and `items` are its labels and by what to divide their loss, if the user says that;
    `counted` says how often each layer had been called before it. `entered` says whether it has
    come to the model of its text, where there is another beside it, with a mask that was `prepared`
    before. `masks` are those of the buckets of distances, in an encoder or in a decoder. `cache`
    has its keys, and `joined` says whether its outputs will be put together.
    """

    session: Session
    sharding: Sharding
    labels: Tensor | None = None
    items: int | Tensor | None = None
    counted: dict[nn.Module, int] = field(init=False)
    entered: bool = False
    prepared: ShardedMask | None = None
    masks: dict[bool, Masks] = field(default_factory=dict)
    cache: Any = None
    joined: bool = True

    def __post_init__(self) -> None:
        self.counted = {x: layer.calls for x, layer in self.session.layers.items()}

    @property
    def reached(self) -> set[nn.Module]:
        """The layers that it has come through."""
        return {x for x, layer in self.session.layers.items() if layer.calls > self.counted[x]}

    def side(self, encoder: bool) -> Side:
        """Return the encoder's tokens or the others'."""
        side = self.sharding.encoder if encoder else self.sharding.main
        assert side is not None
        return side


@dataclass(frozen=True, eq=False)
class ShardedMask:
    """What layers are given as their mask: it goes with checkpointed layers into backward."""

    call: ModelCall
    seen: MaskShape

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


class PreparedMask(ShardedMask):
    """The mask of all layers, made before the model is called, which gives it on as it is."""

    ndim = 0
    shape = (0,)


class _Current(threading.local):
    """The call of a model that runs in this thread: torch.compile traces no ContextVar."""

    call: ModelCall | None = None

    def set(self, call: ModelCall | None) -> ModelCall | None:
        """Make a call the current one; return the one before, to which it is set afterwards."""
        before, self.call = self.call, call
        return before


current = _Current()

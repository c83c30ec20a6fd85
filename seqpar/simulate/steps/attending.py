"""The attention and matrix products of one layer, on tensors without data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.comm.messages.exchange import Comm
from seqpar.costs.model import Layer, Model
from seqpar.linear.kinds import kind as kind_of
from seqpar.softmax.module import Attention
from seqpar.strategies.recurrent import RecurrentAttention
from seqpar.strategies.registry import make_attention


class Products(NamedTuple):
    """The weights of a layer, and the cost of its matrix products' backward.

    Attributes:
        weights: those that each token is multiplied with.
        stored: all of them, of all experts.
        backward: the number of forwards that backward costs.
    """

    weights: float
    stored: float
    backward: int

    def flops(self, tokens: int) -> tuple[int, int]:
        """Return the FLOPs of forward and of backward for a number of tokens."""
        forward = int(2 * self.weights * tokens)
        return forward, self.backward * forward


@dataclass(frozen=True)
class Attending:
    """The attention of one layer: operands, arguments and module.

    Attributes:
        model, layer: the layer and its model.
        dtype: the dtype of the operands.
        transport: the transport of the layer's maps or states, if it is linear.
    """

    model: Model
    layer: Layer
    dtype: torch.dtype
    transport: str = "all_gather"

    @property
    def linear(self) -> bool:
        """Whether the layer has linear attention instead of softmax attention."""
        return self.layer.kind == "linear"

    def shapes(self, tokens: int) -> list[tuple[int, int, int]]:
        """Return the shapes of q, k and v."""
        m, r = self.model, self.model.recurrence
        if self.linear:
            assert r is not None
            keys = tokens, r.key_heads, r.key_dim
            return [keys, keys, (tokens, r.value_heads, r.value_dim)]
        keys = tokens, m.kv_heads, m.head_dim
        return [(tokens, m.heads, m.head_dim), keys, keys]

    def operands(self, tokens: int) -> list[Tensor]:
        """Return q, k and v, which require gradients."""
        return [self._empty(shape, self.dtype) for shape in self.shapes(tokens)]

    def call(self, tokens: int) -> dict[str, object]:
        """Return the other arguments of a call: causal and the layer's window, or the gates."""
        if not self.linear:
            window = -1 if self.layer.window is None else self.layer.window - 1
            return {"causal": True, "window_size": (window, -1)}
        r = self.model.recurrence
        assert r is not None
        kind, heads = kind_of(r.kind), max(r.key_heads, r.value_heads)
        gates: dict[str, object] = {}
        if kind.decay == "constant":
            # LASP-2 and ZeCO read the values of a constant decay.
            device = "meta" if self.transport == "tree" else "cpu"
            gates["log_decay"] = torch.full((heads,), -0.1, device=device)
        elif kind.decay is not None:
            key_dims = (r.key_dim,) if kind.decay == "key" else ()
            gates["log_decay"] = self._empty((tokens, heads, *key_dims), torch.float32)
        if kind.uses_beta:
            gates["beta"] = self._empty((tokens, heads), torch.float32)
        return gates

    def module(
        self, comm: Comm, strategy: str = "ring", **options: Any
    ) -> Attention | RecurrentAttention:
        """Return the layer's module: of this strategy or, if linear, of `transport`."""
        if not self.linear:
            return make_attention(strategy, comm, **options)
        assert self.model.recurrence is not None
        return RecurrentAttention(comm, self.model.recurrence.kind, self.transport)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

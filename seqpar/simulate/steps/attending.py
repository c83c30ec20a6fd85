"""What a layer computes, on tensors without data: its attention, and its matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.comm.messages.exchange import Comm
from seqpar.costs.layers import Layer
from seqpar.costs.model import Model
from seqpar.recurrent.kinds import kind as kind_of
from seqpar.softmax.module import Attention
from seqpar.strategies.recurrent import RecurrentAttention
from seqpar.strategies.registry import make_attention


class Products(NamedTuple):
    """A layer's matrix products: the weights that a token meets, and how often backward does."""

    weights: float
    backward: int

    def flops(self, tokens: int) -> tuple[int, int]:
        """Return the FLOPs of tokens, forward and backward."""
        forward = int(2 * self.weights * tokens)
        return forward, self.backward * forward


@dataclass(frozen=True)
class Attending:
    """A layer's attention: the shapes of its operands, its call, and its module.

    Attributes:
        model, layer: whose attention it is.
        dtype: of the operands.
        transport: of the layer's maps or states, if it is linear.
    """

    model: Model
    layer: Layer
    dtype: torch.dtype
    transport: str = "all_gather"

    @property
    def linear(self) -> bool:
        """Whether it is linear, and not softmax, attention."""
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

    def call(self, tokens: int) -> dict[str, Any]:
        """Return the further arguments of a call: causal, with the layer's window, or gates."""
        if not self.linear:
            window = -1 if self.layer.window is None else self.layer.window - 1
            return {"causal": True, "window_size": (window, -1)}
        r = self.model.recurrence
        assert r is not None
        kind, heads = kind_of(r.kind), max(r.key_heads, r.value_heads)
        gates: dict[str, Any] = {}
        if kind.decay == "constant":
            # LASP-2 and ZeCO read its values
            where = "meta" if self.transport == "tree" else "cpu"
            gates["log_decay"] = torch.full((heads,), -0.1, device=where)
        elif kind.decay is not None:
            of_keys = (r.key_dim,) if kind.decay == "key" else ()
            gates["log_decay"] = self._empty((tokens, heads, *of_keys), torch.float32)
        if kind.uses_beta:
            gates["beta"] = self._empty((tokens, heads), torch.float32)
        return gates

    def module(
        self, comm: Comm, strategy: str = "ring", **options: Any
    ) -> Attention | RecurrentAttention:
        """Return the module on a rank's group: of a strategy, or if linear with the transport."""
        if not self.linear:
            return make_attention(strategy, comm, **options)
        assert self.model.recurrence is not None
        return RecurrentAttention(comm, self.model.recurrence.kind, self.transport)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

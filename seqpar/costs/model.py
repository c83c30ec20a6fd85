"""Model: the shapes of a transformer, and what follows from them alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from seqpar.core.arguments import as_int
from seqpar.costs.config import read_config
from seqpar.costs.layers import Layer, Recurrence
from seqpar.costs.models import CONFIGS


@dataclass(frozen=True)
class Model:
    """A decoder: layers of attention and feed-forward parts between an embedding and a head.

    Make one with `preset` or `from_config`. Numbers of parameters are those of matrices and two
    norms a layer; biases, other norms and convolutions are left out, less than 0.1%.

    Attributes:
        name: what it is called.
        layers: each layer, in order.
        hidden: the width between layers.
        heads, kv_heads, head_dim: those of softmax attention; heads are a multiple of kv_heads.
        vocabulary: how many tokens there are.
        gated: whether feed-forward parts have three matrices (SwiGLU and the like), not two.
        tied: whether the head's matrix is the embedding's.
        output_gate: whether softmax attention's output is gated, with a matrix like the queries'.
        recurrence: what linear layers have; None if there are none.
    """

    name: str
    layers: tuple[Layer, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    gated: bool = True
    tied: bool = False
    output_gate: bool = False
    recurrence: Recurrence | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "heads", "kv_heads", "head_dim", "vocabulary"):
            as_int(f"model.{name}", getattr(self, name), 1)
        if not self.layers:
            raise ValueError("model.layers must have at least one layer")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            )
        if self.recurrence is None and any(layer.kind == "linear" for layer in self.layers):
            raise ValueError("model.recurrence must be given where there are linear layers")

    @classmethod
    def preset(cls, name: str) -> Model:
        """Return a published model by name, like "llama-8b"; an unknown name's error lists all."""
        if name not in CONFIGS:
            raise ValueError(f"preset must be one of {', '.join(CONFIGS)}; got {name!r}")
        return replace(cls.from_config(CONFIGS[name]), name=name)

    @classmethod
    def from_config(cls, config: Any) -> Model:
        """Return the model that a configuration of transformers describes.

        `config` is the object, or the mapping that config.json holds; transformers is not needed.
        Known are decoders with layers of softmax attention, with windows in all or some of them,
        mixtures of experts, and linear layers of the gated delta rule or of lightning attention.
        Raise a ValueError that names the attribute which is missing, or describes what is not
        known.
        """
        return cls(**read_config(config))

    @cached_property
    def counts(self) -> dict[Layer, int]:
        """How many layers there are of each different one."""
        return dict(Counter(self.layers))

    def attention_weights(self, layer: Layer) -> int:
        """Return the weights of a layer's attention: its projections."""
        if layer.kind == "linear":
            assert self.recurrence is not None
            r = self.recurrence
            keys, values = r.key_heads * r.key_dim, r.value_heads * r.value_dim
            # q and k; v, its gate and the output; decay and strength of each head
            return self.hidden * (2 * keys + 3 * values + 2 * r.value_heads)
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (queries * (3 if self.output_gate else 2) + 2 * keys)

    def ffn_weights(self, layer: Layer, stored: bool = False) -> int:
        """Return the weights of a feed-forward part that a token meets, or all that are stored."""
        width = layer.stored_ffn if stored else layer.ffn
        return self.hidden * (width * (3 if self.gated else 2) + layer.experts)

    def layer_parameters(self, layer: Layer) -> int:
        """Return how many parameters a layer stores."""
        norms = 2 * self.hidden
        return self.attention_weights(layer) + self.ffn_weights(layer, stored=True) + norms

    @cached_property
    def parameters(self) -> int:
        """How many parameters there are."""
        layers = sum(n * self.layer_parameters(layer) for layer, n in self.counts.items())
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return layers + embeddings + self.hidden

    @cached_property
    def flops_per_token(self) -> int:
        """FLOPs of a token's forward through all matrices, the head's included.

        That is 2 a weight that the token meets. Attention itself is not in it.
        """
        weights = sum(
            n * (self.attention_weights(layer) + self.ffn_weights(layer))
            for layer, n in self.counts.items()
        )
        return 2 * (weights + self.vocabulary * self.hidden)

    @property
    def key_value_elements(self) -> int:
        """Elements of a token's keys and values in one softmax layer: what a ring sends."""
        return 2 * self.kv_heads * self.head_dim

    def attention_elements(self, layer: Layer) -> int:
        """Return the elements of a token's queries, keys, values and results of attention."""
        if layer.kind == "linear":
            assert self.recurrence is not None
            r = self.recurrence
            return 2 * (r.key_heads * r.key_dim + r.value_heads * r.value_dim)
        return 2 * (self.heads + self.kv_heads) * self.head_dim

    @property
    def state_elements(self) -> int:
        """Elements of a span's state in one linear layer; 0 if there is none."""
        r = self.recurrence
        return 0 if r is None else r.value_heads * r.key_dim * r.value_dim

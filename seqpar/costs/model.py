"""Model: the shapes of a transformer, and the amounts that follow from them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from seqpar.core.arguments import as_int
from seqpar.costs.config import PUBLISHED_CONFIGS, read_config
from seqpar.costs.layers import Layer, Recurrence


@dataclass(frozen=True)
class Model:
    """A decoder: layers of attention and feed-forward parts between an embedding and a head.

    Create one with `preset` or `from_config`. Numbers of parameters count matrices and two norms
    per layer. Biases, other norms and convolutions, less than 0.1%, are left out.

    Attributes:
        name: its name.
        layers: all layers, in order.
        hidden: the width between layers.
        heads, kv_heads, head_dim: softmax attention; heads is a multiple of kv_heads.
        vocabulary: the number of tokens in the vocabulary.
        gated: whether feed-forward parts have three matrices (as SwiGLU) instead of two.
        tied: whether the head shares the embedding's matrix.
        output_gate: whether a gate with a matrix like the queries' scales softmax attention's
            output.
        recurrence: the shapes of linear layers; None without any.
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
            found = f"{self.heads} and {self.kv_heads}"
            raise ValueError(f"model.heads must be a multiple of kv_heads, got {found}")
        if self.recurrence is None and any(layer.kind == "linear" for layer in self.layers):
            raise ValueError("model.recurrence must be given where there are linear layers")

    @classmethod
    def preset(cls, name: str) -> Model:
        """Return a published model by name, as "llama-8b"; an unknown name's error lists all."""
        if name not in PUBLISHED_CONFIGS:
            raise ValueError(f"preset must be one of {', '.join(PUBLISHED_CONFIGS)}; got {name!r}")
        return replace(cls.from_config(PUBLISHED_CONFIGS[name]), name=name)

    @classmethod
    def from_config(cls, config: object) -> Model:
        """Return the model that a transformers configuration describes.

        `config` is the object, or the mapping in config.json; transformers need not be installed.
        Supported are decoders with softmax attention, windows in all or some layers, mixtures of
        experts, and linear layers of the gated delta rule or of lightning attention. Raise a
        ValueError that names an attribute which is missing or not supported.
        """
        return cls(**read_config(config))

    @cached_property
    def counts(self) -> dict[Layer, int]:
        """The number of layers of each kind."""
        return dict(Counter(self.layers))

    def attention_weights(self, layer: Layer) -> int:
        """Return the number of weights in a layer's attention projections."""
        if layer.kind == "linear":
            assert self.recurrence is not None
            r = self.recurrence
            keys, values = r.key_heads * r.key_dim, r.value_heads * r.value_dim
            # q and k; v, its gate and the output; decay and beta of each head
            return self.hidden * (2 * keys + 3 * values + 2 * r.value_heads)
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (queries * (3 if self.output_gate else 2) + 2 * keys)

    def ffn_weights(self, layer: Layer, stored: bool = False) -> int:
        """Return the feed-forward weights that a token uses or, with `stored`, all of them."""
        width = layer.stored_ffn if stored else layer.ffn
        return self.hidden * (width * (3 if self.gated else 2) + layer.experts)

    def layer_parameters(self, layer: Layer) -> int:
        """Return the number of parameters that a layer stores."""
        norms = 2 * self.hidden
        return self.attention_weights(layer) + self.ffn_weights(layer, stored=True) + norms

    @cached_property
    def parameters(self) -> int:
        """The number of parameters."""
        layers = sum(n * self.layer_parameters(layer) for layer, n in self.counts.items())
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return layers + embeddings + self.hidden

    @cached_property
    def flops_per_token(self) -> int:
        """FLOPs of a token's forward through all matrices, including the head.

        This is 2 for each weight that the token uses, without attention itself.
        """
        weights = sum(
            n * (self.attention_weights(layer) + self.ffn_weights(layer))
            for layer, n in self.counts.items()
        )
        return 2 * (weights + self.vocabulary * self.hidden)

    @property
    def key_value_elements(self) -> int:
        """Elements of a token's key and value in one softmax layer."""
        return 2 * self.kv_heads * self.head_dim

    def attention_elements(self, layer: Layer) -> int:
        """Return the elements of a token's query, key, value and result of attention."""
        if layer.kind == "linear":
            assert self.recurrence is not None
            r = self.recurrence
            return 2 * (r.key_heads * r.key_dim + r.value_heads * r.value_dim)
        return 2 * (self.heads + self.kv_heads) * self.head_dim

    @property
    def state_elements(self) -> int:
        """Elements of a span's state in one linear layer; 0 without linear layers."""
        r = self.recurrence
        return 0 if r is None else r.value_heads * r.key_dim * r.value_dim

"""Model: the shapes of a transformer, from a preset or from a transformers configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from seqpar.core.arguments import as_choice, as_int, shown
from seqpar.linear.kinds import kind as kind_of

KINDS = ("softmax", "window", "linear")
LAYER_KINDS = {
    "full_attention": "softmax",
    "attention": "softmax",
    "sliding_attention": "window",
    "linear_attention": "linear",
    1: "softmax",  # MiniMax
    0: "linear",
}
# Decoders whose feed-forward parts have two matrices. All other decoders have gated feed-forward
# parts with three matrices.
UNGATED = {
    "apertus", "arcee", "bert-generation", "biogpt", "bloom", "codegen", "falcon", "git", "gpt2",
    "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "jais2", "mpt", "nanochat", "nemotron", "opt",
    "persimmon", "phi", "starcoder2",
}  # fmt: skip
# Attributes of configurations that are refused, because costs do not include what they describe.
UNKNOWN = {
    "kv_lora_rank": "multi-head latent attention",
    "attention_chunk_size": "attention in chunks",
    **dict.fromkeys(("layers_block_type", "hybrid_override_pattern"), "mixed blocks"),
    **dict.fromkeys(("block_types", "attn_layer_period"), "mixed blocks"),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), "Mamba layers"),
    **dict.fromkeys(("global_head_dim", "num_global_key_value_heads"), "a second kind of heads"),
    "hybrid_layer_pattern": "mixed blocks",
    "mlp_layer_types": "a choice of the feed-forward part for each layer",
    "moe_num_experts": "a mixture of experts that is described by this name",
    "num_kv_shared_layers": "layers that share keys",
    "H_cycles": "repeated stacks of layers",  # HRM
    "block_auto_adjust_ff_dim": "a feed-forward width other than intermediate_size",  # LFM2
    "keep_window_size": "a dynamic mask",  # Doge
    "hidden_size_per_layer_input": "embeddings for each layer",  # Gemma 3n and 4
    "kv_channels": "a mixture of attention heads",  # JetMoE
    "type_vocab_size": "an encoder",  # BERT and its family
}


@dataclass(frozen=True)
class Layer:
    """A layer: its attention and its feed-forward part.

    Attributes:
        kind: "softmax", "window" (softmax attention with a window) or "linear" (a recurrence).
        window: for "window", the number of keys to which a query attends, including the key of its
            own token. Otherwise None.
        ffn: the feed-forward width for each token, summed over the token's experts.
        stored_ffn: the feed-forward width summed over all experts; equal to `ffn` without experts.
        experts: the number of experts of the router; 0 without experts.
    """

    kind: str
    window: int | None
    ffn: int
    stored_ffn: int
    experts: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"layer.kind must be one of {KINDS}, got {self.kind!r}")
        if (self.window is not None) != (self.kind == "window"):
            wanted = "a number of keys" if self.kind == "window" else "None"
            raise ValueError(
                f"layer.window must be {wanted} for kind {self.kind!r}, got {self.window!r}"
            )
        if self.window is not None:
            as_int("layer.window", self.window, 1)
        as_int("layer.ffn", self.ffn, 0)
        as_int("layer.experts", self.experts, 0)
        as_int("layer.stored_ffn (at least ffn)", self.stored_ffn, self.ffn)


@dataclass(frozen=True)
class Recurrence:
    """The linear layers of a model. Each of their heads has a state of key_dim × value_dim
    elements.

    `kind` is one of `RecurrentAttention`'s kinds of decay; "linear" has no decay.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kind: str = "linear"

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
            as_int(f"recurrence.{name}", getattr(self, name), 1)
        kind_of(self.kind)  # raises an error for an unknown kind

    @property
    def keys(self) -> int:
        """Elements of a token's keys in all heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of a token's values in all heads."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class Model:
    """A decoder: layers of attention and feed-forward parts between an embedding and a head.

    Create a model with `preset` or `from_config`. Numbers of parameters include all matrices and
    two norms per layer. Biases, further norms and convolutions are not included, because they are
    less than 0.1% of all parameters.

    Attributes:
        name: its name.
        layers: all layers, in order.
        hidden: the width between layers.
        heads, kv_heads, head_dim: the heads of softmax attention. `heads` is a multiple of
            `kv_heads`.
        vocabulary: the number of tokens in the vocabulary.
        gated: whether feed-forward parts have three matrices (as SwiGLU) instead of two.
        tied: whether the head shares the embedding's matrix.
        output_gate: whether a gate scales the output of softmax attention. The gate's matrix has
            the shape of the queries' matrix.
        recurrence: the shapes of linear layers; None without linear layers.
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
            raise ValueError("model.recurrence must be a Recurrence if layers are linear, got None")

    @classmethod
    def preset(cls, name: str) -> Model:
        """Return a published model by its name, such as "llama-8b".

        The error for an unknown name lists all names.
        """
        as_choice("preset", name, tuple(PUBLISHED_CONFIGS))
        return replace(cls.from_config(PUBLISHED_CONFIGS[name]), name=name)

    @classmethod
    def from_config(cls, config: object) -> Model:
        """Return the model that a transformers configuration describes.

        `config` is a configuration object, or the mapping in config.json. transformers need not be
        installed. Decoders with softmax attention are supported. A decoder can have windows in some
        or all layers, mixtures of experts, and linear layers with the gated delta rule or lightning
        attention. Raises a ValueError that names an attribute if it is missing or not supported.
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
            # q and k; v, gate and output; decay and beta of each head
            return self.hidden * (2 * r.keys + 3 * r.values + 2 * r.value_heads)
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (queries * (3 if self.output_gate else 2) + 2 * keys)

    def ffn_weights(self, layer: Layer, stored: bool = False) -> int:
        """Return the number of feed-forward weights of a layer: those that one token uses or, with
        `stored`, the weights of all experts.
        """
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
        """The FLOPs of a token's forward through all matrices, including the head.

        Each weight that the token uses counts as 2 FLOPs. The products of queries, keys and values
        in attention do not count.
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
            return 2 * (self.recurrence.keys + self.recurrence.values)
        return 2 * (self.heads + self.kv_heads) * self.head_dim

    @property
    def state_elements(self) -> int:
        """Elements of a span's state in one linear layer; 0 without linear layers."""
        r = self.recurrence
        return 0 if r is None else r.value_heads * r.key_dim * r.value_dim


class _Config:
    def __init__(self, config: object) -> None:
        self._config = config

    def get(self, *names: str, default: Any = None) -> Any:
        for name in names:
            if isinstance(self._config, Mapping):
                value = self._config.get(name)
            else:
                try:
                    value = getattr(self._config, name, None)
                # Raised by transformers if layers have different values.
                except RuntimeError as error:
                    wanted = "must be the same for all layers: other models are not supported"
                    raise ValueError(f"config.{name} {wanted}") from error
            if value is not None:
                return value
        return default

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the first attribute in `names` that is a number in the configuration, or the
        default.

        Raises a ValueError if the number is below 1. If the default is 0, the number can also be 0.
        """
        value = self.get(*names, default=default)
        if value is None:
            raise ValueError(f"config must have {' or '.join(names)}")
        return as_int(f"config.{names[0]}", value, 0 if default == 0 else 1)


def as_model(value: Model | str) -> Model:
    """Return the model, or the preset of this name. Errors name the argument `model`."""
    if isinstance(value, str):
        try:
            return Model.preset(value)
        except ValueError as fault:
            raise ValueError(f"model: {fault}") from None
    if not isinstance(value, Model):
        way_out = "Model.from_config makes one of a transformers config"
        expected = "a Model or the name of a preset, such as 'llama-8b'"
        raise TypeError(f"model must be {expected}, got {shown(value)}: {way_out}")
    return value


def read_config(config: object) -> dict[str, Any]:
    if config is None or isinstance(config, str | int | float | list | tuple):
        expected = "a transformers config, or the mapping in config.json"
        way_out = "Model.preset has published models by name"
        raise ValueError(f"config must be {expected}, got {shown(config)}: {way_out}")
    attributes = _Config(config)
    if attributes.get("hidden_size") is None and attributes.get("text_config") is not None:
        attributes = _Config(attributes.get("text_config"))  # the text part of a multimodal model
    if attributes.get("is_encoder_decoder"):
        raise ValueError("config.is_encoder_decoder must be false: only decoders are supported")
    for name, feature in UNKNOWN.items():
        if attributes.get(name):
            raise ValueError(f"config.{name} must be unset: {feature} is not supported")
    # In a configuration object, this attribute is always a view, which is not a Mapping.
    if isinstance(attributes.get("per_layer_config"), Mapping):
        raise ValueError(
            "config.per_layer_config must be unset: layers of different sizes are not supported"
        )
    hidden, heads = attributes.number("hidden_size"), attributes.number("num_attention_heads")
    head_dim = attributes.get("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise ValueError(
                f"config must have head_dim, since {heads} heads do not divide the hidden size "
                f"{hidden}"
            )
        head_dim = hidden // heads
    if attributes.get("v_head_dim", default=head_dim) not in (None, head_dim):
        raise ValueError(f"config.v_head_dim must equal head_dim, {head_dim}, or be unset")
    kinds = _kinds(attributes)
    model_type = str(attributes.get("model_type", default="model"))
    return {
        "name": model_type,
        "layers": tuple(
            Layer(kind, window, *_feed_forward(attributes, i))
            for i, (kind, window) in enumerate(kinds)
        ),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": attributes.number("num_key_value_heads", default=heads),
        "head_dim": as_int("config.head_dim", head_dim, 1),
        "vocabulary": attributes.number("vocab_size"),
        "gated": model_type not in UNGATED,
        "tied": bool(attributes.get("tie_word_embeddings", default=False)),
        "output_gate": model_type.startswith(("qwen3_next", "qwen3_5")),
        "recurrence": _recurrence(attributes, heads) if ("linear", None) in kinds else None,
    }


def _kinds(config: _Config) -> list[tuple[str, int | None]]:
    count = config.number("num_hidden_layers")
    types = config.get("layer_types", "attn_type_list")
    if types is None:
        types = _default_types(config, count)
    if isinstance(types, str) or len(types) != count:
        entries = f"num_hidden_layers = {count} entries"
        raise ValueError(f"config.layer_types must have {entries}, got {types!r}")
    unknown = {*types} - {*LAYER_KINDS}
    if unknown:
        found = shown(min(unknown, key=str))
        raise ValueError(f"config.layer_types must be among {[*LAYER_KINDS]}, got {found}")
    kinds = [LAYER_KINDS[name] for name in types]
    window = config.number("sliding_window") if "window" in kinds else None
    return [(kind, window if kind == "window" else None) for kind in kinds]


def _default_types(config: _Config, count: int) -> list[str]:
    model_type, layers = config.get("model_type"), range(count)
    if config.get("full_attention_interval") is not None:
        # In Qwen3-Next, all layers are linear except the last one of each interval.
        interval = config.number("full_attention_interval")
        full = [(i + 1) % interval == 0 for i in layers]
        return ["full_attention" if x else "linear_attention" for x in full]
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return ["full_attention"] * count
    # Gemma 2 has windows in every second layer. Gemma 3 and Cohere 2 have windows in all layers
    # except every `pattern`-th one.
    pattern = config.number(
        "sliding_window_pattern",
        "_sliding_window_pattern",
        default=2 if model_type == "gemma2" else 0,
    )
    if pattern:
        full = [(i + 1) % pattern == 0 for i in layers]
    else:  # Qwen2 has windows in layers from max_window_layers on, and Mistral in all layers
        first = config.number("max_window_layers", default=0) if model_type != "mistral" else 0
        full = [i < first for i in layers]
    return ["full_attention" if x else "sliding_attention" for x in full]


def _feed_forward(config: _Config, layer: int) -> tuple[int, int, int]:
    """Return a layer's feed-forward width per token, the width summed over all experts, and the
    number of experts.
    """
    experts = config.number("num_local_experts", "num_experts", "n_routed_experts", default=0)
    period = config.number("decoder_sparse_step", default=1)
    sparse = (
        layer not in config.get("mlp_only_layers", default=())
        and layer >= config.number("first_k_dense_replace", default=0)
        and (layer + 1) % period == 0
    )
    if not experts or not sparse:
        dense = config.number("intermediate_size")
        return dense, dense, 0
    width = config.number("moe_intermediate_size", "intermediate_size")
    shared = config.number("shared_expert_intermediate_size", "shared_intermediate_size", default=0)
    shared += width * config.number("n_shared_experts", default=0)
    chosen = config.number("num_experts_per_tok")
    if chosen > experts:
        raise ValueError(
            f"config.num_experts_per_tok must be at most the {experts} experts, got {chosen}"
        )
    return width * chosen + shared, width * experts + shared, experts


def _recurrence(config: _Config, heads: int) -> Recurrence:
    """Return the shape of linear layers: the gated delta rule, or MiniMax's lightning attention."""
    if str(config.get("model_type")).lower().startswith("minimax"):
        dim = config.number("head_dim", default=config.number("hidden_size") // heads)
        return Recurrence(heads, heads, dim, dim, "constant_decay")
    return Recurrence(
        config.number("linear_num_key_heads"),
        config.number("linear_num_value_heads"),
        config.number("linear_key_head_dim"),
        config.number("linear_value_head_dim"),
        "gated_delta",
    )


_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "vocab_size",
)  # fmt: skip


def _config(model_type: str, *sizes: int, **others: object) -> dict[str, object]:
    return {"model_type": model_type, **dict(zip(_SIZES, sizes, strict=True)), **others}


_QWEN3_NEXT = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_GEMMA3 = {"tie_word_embeddings": True, "sliding_window": 1024, "sliding_window_pattern": 6}
_GPT_OSS = {"head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128}
_ALTERNATING = ["sliding_attention", "full_attention"]
_QWEN3 = {"head_dim": 128}

# The entries of each model's config.json on which costs depend. LLaMA 7B to 30B are from the first
# LLaMA paper. 34B is Code Llama with 16 KV heads, as in DistCA's measurements.
PUBLISHED_CONFIGS: dict[str, dict[str, object]] = {
    "llama-3b": _config("llama", 3072, 28, 24, 8, 8192, 128256, tie_word_embeddings=True),
    "llama-7b": _config("llama", 4096, 32, 32, 32, 11008, 32000),
    "llama-8b": _config("llama", 4096, 32, 32, 8, 14336, 128256),
    "llama-13b": _config("llama", 5120, 40, 40, 40, 13824, 32000),
    "llama-30b": _config("llama", 6656, 60, 52, 52, 17920, 32000),
    "llama-34b": _config("llama", 8192, 48, 64, 16, 22016, 32000),
    "llama-70b": _config("llama", 8192, 80, 64, 8, 28672, 128256),
    "mistral-7b": _config("mistral", 4096, 32, 32, 8, 14336, 32000, sliding_window=4096),
    "mixtral-8x7b": _config(
        "mixtral", 4096, 32, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2
    ),
    "mixtral-8x22b": _config(
        "mixtral", 6144, 56, 48, 8, 16384, 32768, num_local_experts=8, num_experts_per_tok=2
    ),
    "qwen3-8b": _config("qwen3", 4096, 36, 32, 8, 12288, 151936, **_QWEN3),
    "qwen3-32b": _config("qwen3", 5120, 64, 64, 8, 25600, 151936, **_QWEN3),
    "gemma3-12b": _config("gemma3_text", 3840, 48, 16, 8, 15360, 262208, head_dim=256, **_GEMMA3),
    "gemma3-27b": _config("gemma3_text", 5376, 62, 32, 16, 21504, 262208, head_dim=128, **_GEMMA3),
    "gpt-oss-20b": _config(
        "gpt_oss", 2880, 24, 64, 8, 2880, 201088, num_local_experts=32, layer_types=_ALTERNATING *
        12, **_GPT_OSS,
    ),
    "gpt-oss-120b": _config(
        "gpt_oss", 2880, 36, 64, 8, 2880, 201088, num_local_experts=128, layer_types=_ALTERNATING *
        18, **_GPT_OSS,
    ),
    "qwen3-next-80b": _config("qwen3_next", 2048, 48, 16, 2, 5120, 151936, **_QWEN3_NEXT),
    "minimax-text-01": _config(
        "minimax", 6144, 80, 64, 8, 9216, 200064, head_dim=128, num_local_experts=32,
        num_experts_per_tok=2, attn_type_list=([0] * 7 + [1]) * 10,
    ),
}  # fmt: skip
